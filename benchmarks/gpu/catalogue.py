"""List of the checks: twenty on one device, then ten on several. The most valuable checks of each kind come first."""

from __future__ import annotations

from benchmarks.gpu.check import Check

ONE_DEVICE_S = 870
"""Limit of all checks on one device together, in seconds. It is half a minute less than 15 minutes of device time."""

CHECKS = (
    Check(
        "E1", "copy-latency", "A small copy to the host does not wait for the copy of a snapshot.",
        "docs/memory.md", "benchmarks.gpu.copies:latency", 60, has_cpu_form=True,
    ),
    Check(
        "E2", "page-lock", "Page-locking snapshot memory stops no other thread, and uses no device but the rank's own.",
        "docs/memory.md", "benchmarks.gpu.host_memory:page_lock", 45, has_cpu_form=True,
    ),
    Check(
        "E3", "fork", "A forked data worker shares snapshot memory: it has no copy, and the device still writes there.",
        "docs/memory.md", "benchmarks.gpu.host_memory:fork", 45, has_cpu_form=True,
    ),
    Check(
        "E4", "failed-page-lock", "A failed page-lock leaves no error behind for the next kernel.",
        "docs/memory.md", "benchmarks.gpu.host_memory:failed_page_lock", 20,
    ),
    Check(
        "E5", "numa", "From the device's memory node, copies reach the rate of the link, even beside products.",
        "docs/memory.md", "benchmarks.gpu.copies:numa", 30, has_cpu_form=True,
    ),
    Check(
        "E6", "broken-device", "A process whose CUDA context is broken gives up its rank, and a spare takes it over.",
        "docs/recovery_internals.md", "benchmarks.gpu.lost_devices:broken_device", 50, has_cpu_form=True,
    ),
    Check(
        "E7", "long-call", "A long C call during the set-up of a rank does not count as a hang.",
        "docs/recovery_internals.md", "benchmarks.gpu.lost_devices:long_call", 40, has_cpu_form=True,
    ),
    Check(
        "E8", "takeover", "The device memory of a killed rank is free before its replacement needs it.",
        "docs/recovery_internals.md", "benchmarks.gpu.takeover:takeover", 45,
    ),
    Check(
        "E9", "recovery", "A recovery by replay works with default kernels, and has equal bits in deterministic mode.",
        "docs/guarantees.md", "benchmarks.gpu.training:recovery", 110, has_cpu_form=True,
    ),
    Check(
        "E10", "first-difference", "A second run of each operation of an expert layer has the bits of the first run.",
        "docs/guarantees.md", "benchmarks.gpu.training:first_difference", 30, has_cpu_form=True,
    ),
    Check(
        "E11", "snapshot-cost", "The reported stall is the time that snapshots add to an iteration.",
        "docs/windows.md", "benchmarks.gpu.training:snapshot_cost", 75, has_cpu_form=True,
    ),
    Check(
        "E12", "waiting", "A thread that waits for a copy does not burn a core.",
        "docs/memory.md", "benchmarks.gpu.copies:waiting", 20, has_cpu_form=True,
    ),
    Check(
        "E13", "abort", "Aborting a communicator with queued work is quick, and no generation keeps device memory.",
        "docs/recovery_internals.md", "benchmarks.gpu.collectives:abort_alone", 50, has_cpu_form=True,
    ),
    Check(
        "E14", "digests", "Digests of the whole state on the device cost training next to nothing.",
        "docs/recovery_internals.md", "benchmarks.gpu.digests:digests", 20, has_cpu_form=True,
    ),
    Check(
        "E15", "kernels", "Kernels agree with their references, even on odd shapes, and read nothing out of bounds.",
        "docs/kernels.md", "benchmarks.gpu.kernels:right", 100, has_cpu_form=True,
    ),
    Check(
        "E16", "mixed-experts", "Freezing experts changes no bit of the outputs and of the remaining gradients.",
        "docs/kernels.md", "benchmarks.gpu.kernels:mixed", 30, has_cpu_form=True,
    ),
    Check(
        "E17", "kernel-rates", "Kernels reach a good share of cuBLAS's rate on the same products.",
        "docs/kernels.md", "benchmarks.gpu.kernels:rates", 40,
    ),
    Check(
        "E18", "host-time", "A call with few tokens takes little host time, and new token counts compile nothing.",
        "docs/kernels.md", "benchmarks.gpu.kernels:host_time", 20, has_cpu_form=True,
    ),
    Check(
        "E19", "redo", "A repeated update of some operators from logged gradients has the bits of the first update.",
        "docs/recovery_internals.md", "benchmarks.gpu.updates:redo", 20, has_cpu_form=True,
    ),
    Check(
        "E20", "fp8", "FP8 scales keep changing on survivors, and our quantisers equal Transformer Engine's.",
        "docs/fp8.md", "benchmarks.gpu.recipes:fp8", 20,
    ),
    Check(
        "M1", "torn-collective", "A collective that another rank aborts returns no result.",
        "docs/recovery_internals.md", "benchmarks.gpu.collectives:torn", 120, devices=3, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M2", "late-monitor", "No update is committed from an aborted reduction, even if the monitor is late.",
        "docs/recovery_internals.md", "benchmarks.gpu.jobs:late_monitor", 240, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M3", "kills", "A kill in any phase of an iteration costs seconds, and the job ends with equal bits.",
        "docs/recovery_internals.md", "benchmarks.gpu.jobs:kills", 600, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M4", "second-kill", "A job survives a second failure while its groups are made.",
        "docs/recovery_internals.md", "benchmarks.gpu.jobs:second_kill", 240, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M5", "replacement-bits", "A replacement on the same device computes the bits of the lost rank.",
        "docs/guarantees.md", "benchmarks.gpu.jobs:replacement_bits", 400, devices=2, has_cpu_form=True,
        can_share=True,
    ),
    Check(
        "M6", "split-group", "A group with one rank on another node is slower. The check measures by how much.",
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
        "M9", "replication", "Copies to peers reach the rate of the interface, and do not slow training's collectives.",
        "docs/cluster.md", "benchmarks.gpu.replication:replication", 120, devices=2, has_cpu_form=True,
    ),
    Check(
        "M10", "fp8-survivors", "A job with delayed FP8 scaling has equal bits after a kill.",
        "docs/fp8.md", "benchmarks.gpu.jobs:fp8_survivors", 240, devices=2, can_share=True,
    ),
)  # fmt: skip
