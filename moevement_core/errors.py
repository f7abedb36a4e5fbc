"""The errors a caller may want to tell apart.

Every message says the value found, the value needed and what to do about it. Libraries raise these; only the
command line turns one into a line on stderr and an exit code.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoEvementError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(MoEvementError):
    """A flag, a configuration file or a combination of them cannot work; nothing was started."""


class VariableError(ConfigError):
    """An environment variable of this process, maybe of no other one, cannot be."""


class CodeDiffers(ConfigError):
    """A process that was to join a job would run other code, flags or packages than the job; it did not join."""


class FolderInUse(ConfigError):
    """Another job writes to a folder that this one was to write to; nothing was overwritten."""


class OperatorError(ConfigError):
    """Operators that cannot be: a negative size, a name twice, a name that nobody has."""


class PopularityError(ConfigError):
    """Activation counts that cannot be: NaN, negative, missing or of an unknown operator."""


class WindowError(ConfigError):
    """Error: no window follows from the given numbers, for lack of a bandwidth, an iteration time or an operator."""


class ScheduleError(MoEvementError):
    """A question that a schedule has no answer to: an iteration before it begins, snapshots that recover nothing."""


class ExchangeError(MoEvementError):
    """Error: another process sent something unexpected."""


class SnapshotError(MoEvementError):
    """A snapshot that cannot be used: damaged, torn, stale, of another schedule or of another version."""


class ReplicationError(MoEvementError):
    """A copy on a peer cannot be made: the peer is gone, or refuses it."""


class RecoveryError(MoEvementError):
    """State cannot be brought back, or what was brought back is not what was lost."""


class DataError(MoEvementError):
    """Text, token files or a tokenizer that cannot be read or do not fit together."""


class RunRecordError(MoEvementError):
    """A run directory is missing, unfinished or damaged."""


class ProcessGroupError(MoEvementError):
    """Error: one of the processes that were started together failed or did not end in time."""


class JobStopped(MoEvementError):
    """The job has ended, or was given up, while this process waited to take part in it."""


class ResultError(MoEvementError):
    """A computed result cannot be right: it is not finite, or it was another one when it was computed again.

    Args:
        message: what was found, where, and in which iteration.
        suspects: ranks whose processes computed it and may compute it again; one of them is to be replaced. Empty if
            computing it again may be enough.
    """

    def __init__(self, message: str, suspects: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


class InjectedFault(MoEvementError):
    """Failure that a drill asked for."""
