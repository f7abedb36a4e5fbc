"""Checks in their order: twenty on one device, ten on several. The most valuable ones come first."""

from __future__ import annotations

from benchmarks.gpu.check import Check

ONE_DEVICE_S = 870
"""Limit of all checks on one device together, in seconds: half a minute less than a quarter of an hour."""

CHECKS = (
    Check(
        "E1", "copy-latency", "A small copy to the host does not wait behind the snapshot that is being copied.",
        "docs/memory.md", "benchmarks.gpu.copies:latency", 60, has_cpu_form=True,
    ),
    Check(
        "E2", "page-lock", "Page-locking snapshot memory stops no other thread, and touches this rank's device alone.",
        "docs/memory.md", "benchmarks.gpu.host_memory:page_lock", 45, has_cpu_form=True,
    ),
    Check(
        "E3", "fork", "A forked data worker shares snapshot memory: it gets no copy, and the device's writes arrive.",
        "docs/memory.md", "benchmarks.gpu.host_memory:fork", 45, has_cpu_form=True,
    ),
    Check(
        "E4", "failed-page-lock", "A failed page-lock leaves no error behind for the next kernel.",
        "docs/memory.md", "benchmarks.gpu.host_memory:failed_page_lock", 20,
    ),
    Check(
        "E5", "numa", "Copies reach the link's rate from the memory node of the device, beside products too.",
        "docs/memory.md", "benchmarks.gpu.copies:numa", 30, has_cpu_form=True,
    ),
    Check(
        "E6", "broken-device", "A rank whose CUDA context is broken gives its rank back, and a spare goes on.",
        "docs/recovery_internals.md", "benchmarks.gpu.lost_devices:broken_device", 50, has_cpu_form=True,
    ),
    Check(
        "E7", "long-call", "A long C call while a rank is set up is no hang.",
        "docs/recovery_internals.md", "benchmarks.gpu.lost_devices:long_call", 40, has_cpu_form=True,
    ),
    Check(
        "E8", "takeover", "The memory of a killed rank's device is free before its replacement has been built.",
        "docs/recovery_internals.md", "benchmarks.gpu.takeover:takeover", 45,
    ),
    Check(
        "E9", "recovery", "A recovery by replay goes on with default kernels, with equal bits in deterministic mode.",
        "docs/guarantees.md", "benchmarks.gpu.training:recovery", 110, has_cpu_form=True,
    ),
    Check(
        "E10", "first-difference", "Operators of the expert layer come to the same bits when they are run again.",
        "docs/guarantees.md", "benchmarks.gpu.training:first_difference", 30, has_cpu_form=True,
    ),
    Check(
        "E11", "snapshot-cost", "The reported stall is what snapshots cost an iteration.",
        "docs/windows.md", "benchmarks.gpu.training:snapshot_cost", 75, has_cpu_form=True,
    ),
    Check(
        "E12", "waiting", "A thread that waits for a copy does not burn a core.",
        "docs/memory.md", "benchmarks.gpu.copies:waiting", 20, has_cpu_form=True,
    ),
    Check(
        "E13", "abort", "Aborting a communicator with work queued is quick, and no generation keeps device memory.",
        "docs/recovery_internals.md", "benchmarks.gpu.collectives:abort_alone", 50, has_cpu_form=True,
    ),
    Check(
        "E14", "digests", "Digests of the whole state on the device cost training next to nothing.",
        "docs/recovery_internals.md", "benchmarks.gpu.digests:digests", 20, has_cpu_form=True,
    ),
    Check(
        "E15", "kernels", "Kernels agree with their references, on odd shapes too, and read nothing out of bounds.",
        "docs/kernels.md", "benchmarks.gpu.kernels:right", 100, has_cpu_form=True,
    ),
    Check(
        "E16", "mixed-experts", "Mixed frozen and active experts have the bits of all-active ones.",
        "docs/kernels.md", "benchmarks.gpu.kernels:mixed", 30, has_cpu_form=True,
    ),
    Check(
        "E17", "kernel-rates", "Kernels reach a good share of what cuBLAS does on the same products.",
        "docs/kernels.md", "benchmarks.gpu.kernels:rates", 40,
    ),
    Check(
        "E18", "host-time", "A call for few tokens costs the host little, and new token counts compile nothing.",
        "docs/kernels.md", "benchmarks.gpu.kernels:host_time", 20, has_cpu_form=True,
    ),
    Check(
        "E19", "redo", "An update of some operators from logged gradients has the bits of the first one.",
        "docs/recovery_internals.md", "benchmarks.gpu.updates:redo", 20, has_cpu_form=True,
    ),
    Check(
        "E20", "fp8", "Scales of FP8 go on moving on survivors, and our quantisers have Transformer Engine's bytes.",
        "docs/fp8.md", "benchmarks.gpu.recipes:fp8", 20,
    ),
    Check(
        "M1", "torn-collective", "A collective that a neighbour aborts gives no number.",
        "docs/recovery_internals.md", "benchmarks.gpu.collectives:torn", 120, devices=3, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M2", "late-monitor", "No update is committed from an aborted reduction, however late the monitor is.",
        "docs/recovery_internals.md", "benchmarks.gpu.jobs:late_monitor", 240, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M3", "kills", "A rank that is killed in any phase costs seconds, and the job ends with equal bits.",
        "docs/recovery_internals.md", "benchmarks.gpu.jobs:kills", 600, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M4", "second-kill", "A second failure while groups are made is survived.",
        "docs/recovery_internals.md", "benchmarks.gpu.jobs:second_kill", 240, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M5", "replacement-bits", "A replacement on the same device comes to the bits of the rank that was lost.",
        "docs/guarantees.md", "benchmarks.gpu.jobs:replacement_bits", 400, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M6", "split-group", "A group that spans nodes is slower; how much, with one rank on another node.",
        "docs/cluster.md", "benchmarks.gpu.collectives:split", 120, devices=2, has_cpu_form=True,
    ),
    Check(
        "M7", "nvls", "With NVLS no generation keeps device memory after an abort.",
        "docs/recovery_internals.md", "benchmarks.gpu.collectives:nvls", 240, devices=2, has_cpu_form=True,
    ),
    Check(
        "M8", "abort-skew", "Ranks of a node may abort seconds apart.",
        "docs/recovery_internals.md", "benchmarks.gpu.collectives:skewed", 120, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M9", "replication", "Copies to peers leave at the interface's rate, and training's collectives beside them.",
        "docs/cluster.md", "benchmarks.gpu.replication:replication", 120, devices=2, has_cpu_form=True,
    ),
    Check(
        "M10", "fp8-survivors", "A job with delayed scaling has equal bits after a rank was killed.",
        "docs/fp8.md", "benchmarks.gpu.jobs:fp8_survivors", 240, devices=2, can_share=True,
    ),
)  # fmt: skip
