"""List of the checks: twenty on one device, then ten on several. The most valuable checks of each kind come first."""

from __future__ import annotations

from benchmarks.gpu.check import Check

ONE_DEVICE_S = 870
"""Limit of all checks on one device together, in seconds. It is half a minute less than 15 minutes of device time."""

CHECKS = (
    Check(
        number="E1", name="copy-latency", claim="A small copy to the host does not wait for the copy of a snapshot.",
        page="docs/memory.md", body="benchmarks.gpu.copies:latency", limit_s=60, has_cpu_form=True,
    ),
    Check(
        number="E2", name="page-lock", claim="Page-locking snapshot memory stops no other thread, and uses no device but the rank's own.",
        page="docs/memory.md", body="benchmarks.gpu.host_memory:page_lock", limit_s=45, has_cpu_form=True,
    ),
    Check(
        number="E3", name="fork", claim="A forked data worker shares snapshot memory: it has no copy, and the device still writes there.",
        page="docs/memory.md", body="benchmarks.gpu.host_memory:fork", limit_s=45, has_cpu_form=True,
    ),
    Check(
        number="E4", name="failed-page-lock", claim="A failed page-lock leaves no error behind for the next kernel.",
        page="docs/memory.md", body="benchmarks.gpu.host_memory:failed_page_lock", limit_s=20,
    ),
    Check(
        number="E5", name="numa", claim="From the device's NUMA node, copies reach the rate of the link, even beside products.",
        page="docs/memory.md", body="benchmarks.gpu.copies:numa", limit_s=30, has_cpu_form=True,
    ),
    Check(
        number="E6", name="broken-device", claim="A process whose CUDA context is broken gives up its rank, and a spare takes it over.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.lost_devices:broken_device", limit_s=50, has_cpu_form=True,
    ),
    Check(
        number="E7", name="long-call", claim="A long C call during the set-up of a rank does not count as a hang.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.lost_devices:long_call", limit_s=40, has_cpu_form=True,
    ),
    Check(
        number="E8", name="takeover", claim="The device memory of a killed rank is free before its replacement needs it.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.takeover:takeover", limit_s=45,
    ),
    Check(
        number="E9", name="recovery", claim="A recovery by replay works with default kernels, and has equal bits in deterministic mode.",
        page="docs/guarantees.md", body="benchmarks.gpu.training:recovery", limit_s=110, has_cpu_form=True,
    ),
    Check(
        number="E10", name="first-difference", claim="A second run of each operation of an expert layer has the bits of the first run.",
        page="docs/guarantees.md", body="benchmarks.gpu.training:first_difference", limit_s=30, has_cpu_form=True,
    ),
    Check(
        number="E11", name="snapshot-cost", claim="The reported stall is the time that snapshots add to an iteration.",
        page="docs/windows.md", body="benchmarks.gpu.training:snapshot_cost", limit_s=75, has_cpu_form=True,
    ),
    Check(
        number="E12", name="waiting", claim="A thread that waits for a copy does not burn a core.",
        page="docs/memory.md", body="benchmarks.gpu.copies:waiting", limit_s=20, has_cpu_form=True,
    ),
    Check(
        number="E13", name="abort", claim="Aborting a communicator with queued work is quick, and no generation keeps device memory.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.collectives:abort_alone", limit_s=50, has_cpu_form=True,
    ),
    Check(
        number="E14", name="digests", claim="Digests of the whole state on the device cost training next to nothing.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.digests:digests", limit_s=20, has_cpu_form=True,
    ),
    Check(
        number="E15", name="kernels", claim="Kernels agree with their references, even on odd shapes, and read nothing out of bounds.",
        page="docs/kernels.md", body="benchmarks.gpu.kernels:right", limit_s=100, has_cpu_form=True,
    ),
    Check(
        number="E16", name="mixed-experts", claim="Freezing experts changes no bit of the outputs and of the remaining gradients.",
        page="docs/kernels.md", body="benchmarks.gpu.kernels:mixed", limit_s=30, has_cpu_form=True,
    ),
    Check(
        number="E17", name="kernel-rates", claim="Kernels reach a good share of cuBLAS's rate on the same products.",
        page="docs/kernels.md", body="benchmarks.gpu.kernels:rates", limit_s=40,
    ),
    Check(
        number="E18", name="host-time", claim="A call with few tokens takes little host time, and new token counts compile nothing.",
        page="docs/kernels.md", body="benchmarks.gpu.kernels:host_time", limit_s=20, has_cpu_form=True,
    ),
    Check(
        number="E19", name="redo", claim="A repeated update of some operators from logged gradients has the bits of the first update.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.updates:redo", limit_s=20, has_cpu_form=True,
    ),
    Check(
        number="E20", name="fp8", claim="FP8 scales keep changing on survivors, and our quantisers equal Transformer Engine's.",
        page="docs/fp8.md", body="benchmarks.gpu.recipes:fp8", limit_s=20,
    ),
    Check(
        number="M1", name="torn-collective", claim="A collective that another rank aborts returns no result.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.collectives:torn", limit_s=120, devices=3, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        number="M2", name="late-monitor", claim="No update is committed from an aborted reduction, even if the monitor is late.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.jobs:late_monitor", limit_s=240, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        number="M3", name="kills", claim="A kill in any phase of an iteration costs seconds, and the job ends with equal bits.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.jobs:kills", limit_s=600, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        number="M4", name="second-kill", claim="A job survives a second failure while its groups are made.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.jobs:second_kill", limit_s=240, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        number="M5", name="replacement-bits", claim="A replacement on the same device computes the bits of the lost rank.",
        page="docs/guarantees.md", body="benchmarks.gpu.jobs:replacement_bits", limit_s=400, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        number="M6", name="split-group", claim="A group with one rank on another node is slower. The check measures by how much.",
        page="docs/cluster.md", body="benchmarks.gpu.collectives:split", limit_s=120, devices=2, has_cpu_form=True,
    ),
    Check(
        number="M7", name="nvls", claim="With NVLS no generation keeps device memory after an abort.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.collectives:nvls", limit_s=240, devices=2, has_cpu_form=True,
    ),
    Check(
        number="M8", name="abort-skew", claim="Ranks of a node may abort seconds apart.",
        page="docs/recovery_internals.md", body="benchmarks.gpu.collectives:skewed", limit_s=120, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        number="M9", name="replication", claim="Copies to peers reach the rate of the interface, and do not slow training's collectives.",
        page="docs/cluster.md", body="benchmarks.gpu.replication:replication", limit_s=120, devices=2, has_cpu_form=True,
    ),
    Check(
        number="M10", name="fp8-survivors", claim="A job with delayed FP8 scaling has equal bits after a kill.",
        page="docs/fp8.md", body="benchmarks.gpu.jobs:fp8_survivors", limit_s=240, devices=2, can_share=True,
    ),
)  # fmt: skip
