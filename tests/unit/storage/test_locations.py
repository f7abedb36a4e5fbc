"""A location is a folder or a URL; a URL never carries credentials into logs or files."""

from __future__ import annotations

from pathlib import Path

import pytest

from moevement_core.errors import ConfigError
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.locations import check_location, described, is_url, refuse_exposed, without_secrets
from moevement_core.storage.object_store import ObjectStore
from moevement_core.storage.places import store_at

FLAG = "--moevement-persist-dir"
EXPOSED = [
    "s3://AKIA1:sesame@bucket/job",
    "https://host/job?sig=sesame",
    "gs://bucket/job#sesame",
    "S3://sesame@bucket",
]


@pytest.mark.parametrize("location", ["runs/windows", "/data/{node}/windows", "file:/odd", "a:b", "s3:bucket", ""])
def test_what_has_no_scheme_is_a_folder(location: str) -> None:
    assert not is_url(location)
    assert check_location(FLAG, location) == location
    assert isinstance(store_at(location), FolderStore)


@pytest.mark.parametrize("location", ["memory://bucket/job", "file:///data/job", "MEMORY://bucket"])
def test_a_url_is_a_store(location: str) -> None:
    assert check_location(FLAG, location) == location
    assert store_at(location) == ObjectStore(f"{location}/")


def test_the_same_place_is_equal() -> None:
    assert store_at("runs") == store_at("./runs") == FolderStore(Path("runs").resolve())
    assert store_at("memory://a") != store_at("memory://b")


@pytest.mark.parametrize("url", EXPOSED)
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_location(FLAG, url)
    assert FLAG in str(refused.value)
    assert "sesame" not in str(refused.value)
    for words in ([FLAG, url], [f"{FLAG}={url}"], ["--moevement-persist", url]):
        with pytest.raises(ConfigError) as refused:
            refuse_exposed(["--lr", "1", *words])
        assert "sesame" not in str(refused.value)


def test_other_flags_may_have_urls_of_any_kind() -> None:
    refuse_exposed(["--tokenizer", "https://me:sesame@host", "--moevement-load", "s3://bucket/job", "--x=http://a?b"])


@pytest.mark.parametrize("url", ["nothing://bucket", "memory://a/{node}", "simplecache::memory://a"])
def test_a_url_that_no_job_can_use_is_refused(url: str) -> None:
    if not is_url(url):
        assert check_location(FLAG, url) == url
        return
    with pytest.raises(ConfigError, match=url.partition(":")[0]):
        check_location(FLAG, url)


def test_secrets_of_the_environment_do_not_reach_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "opensesame")
    assert "opensesame" not in without_secrets("key=opensesame")
    reason = described(RuntimeError("opensesame: https://me:you@host/a?X-Amz-Signature=1\nmore"))
    assert reason.partition(": ")[2] == "***: https://***@host/a?***"
    assert described(PermissionError(13, "denied")) == "denied"
