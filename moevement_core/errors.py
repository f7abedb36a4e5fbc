"""Errors of this project, one class for each kind that a caller may handle differently.

Every message has the value found, the value needed and the remedy. Only the command line converts an error to a line on
stderr and an exit code. All other code passes the error on to its caller.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoEvementError(Exception):
    """Base class of all errors that this project raises on purpose."""


class ConfigError(MoEvementError):
    """Error in a flag, a configuration file or a combination of them, raised before anything starts."""


class VariableError(ConfigError):
    """Error in an environment variable of this process; other processes may have a valid value."""


class CodeDiffers(ConfigError):
    """Error of a process that must not join a job because its code, flags or packages differ from the job's."""


class MissingPackage(ConfigError):
    """Error of a feature that needs a package of an extra, which is not installed; the message names the extra."""


class FolderInUse(ConfigError):
    """Error of a job that was told to write to a folder that another job uses; it writes nothing there."""


class OperatorError(ConfigError):
    """Error in operators: a negative size, a duplicate name or an unknown name."""


class PopularityError(ConfigError):
    """Error in the token counts or capacities of experts: NaN, negative, missing, or of an unknown operator."""


class WindowError(ConfigError):
    """Error in the values from which a window is computed, such as no bandwidth, no iteration time or no operator."""


class ScheduleError(MoEvementError):
    """Error of a caller that asks about an iteration before the first schedule, or mixes incompatible snapshots.

    Snapshots are incompatible if they hold different numbers of operators.
    """


class ExchangeError(MoEvementError):
    """Error in a message from another process: the message has an unexpected form or content."""


class SnapshotError(MoEvementError):
    """Error in a snapshot, or in a message about snapshots, that is damaged, incomplete or of another version."""


class ReplicationError(MoEvementError):
    """Error of a sender whose peer refuses to set aside the host memory for copies of the sender's snapshots."""


class RecoveryError(MoEvementError):
    """Error of a recovery that cannot restore the state, or that restores a state other than the lost one."""


class DataError(MoEvementError):
    """Error in text, token files or a tokenizer that cannot be read or that do not fit together."""


class RunRecordError(MoEvementError):
    """Error in a run directory that is missing, unfinished or damaged."""


class ProcessGroupError(MoEvementError):
    """Error of several processes that work together: one of them failed or did not end in time."""


class JobStopped(MoEvementError):
    """Error of a process that waits to join a job: the job has ended or was abandoned."""


class ResultError(MoEvementError):
    """Error in a computed result that is not finite, or that differs from an earlier computation of the same step.

    Args:
        message: description of the wrong value, with its place and iteration.
        suspects: ranks whose processes may compute a wrong result again. One of these processes has to be replaced.
            Empty if it may be enough to execute the iteration again.
    """

    def __init__(self, message: str, suspects: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


class CorruptionFound(MoEvementError):
    """Error: an audit has found a wrong result, and no launcher can replace the rank."""


class InjectedFault(MoEvementError):
    """Failure that a test or a rehearsal (``moevement drill``) injects on purpose."""
