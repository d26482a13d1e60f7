"""What fxpipe raises. Every message names what was found, where, and what to do about it."""


class FxpipeError(Exception):
    """Base of everything that fxpipe raises on purpose."""


class CaptureError(FxpipeError):
    """The model could not be traced into one graph; names module, line and construct."""


class ReadError(CaptureError):
    """Python reads values of the input for which no graph can hold."""


class RememberedError(CaptureError):
    """Forward keeps something from one microbatch to the next, and not in a buffer."""


class UnknownSizeError(CaptureError):
    """A size that depends on data decides how a graph is differentiated, and no trace knows it."""


class RegionError(FxpipeError):
    """Regions could not be found, or the user's `regions=` do not fit the model."""


class StageError(FxpipeError):
    """A region cannot be cut into the number of stages asked for."""


class UnknownCrossingError(StageError):
    """A value crosses from stage to stage, and its size follows from data that are not traced."""


class BatchError(FxpipeError):
    """A batch or a microbatch does not fit what was captured, or cannot be split."""


class ScheduleError(FxpipeError):
    """An unknown schedule, or one that the cut cannot have."""


class TableError(FxpipeError):
    """An operator table breaks a rule; the message names the op, the rank and the rule."""


class BackendError(FxpipeError):
    """The backend is unknown, unavailable, or does not fit the number of ranks."""


class RankError(FxpipeError):
    """A rank failed in the middle of a step; names the rank, the op and the cause."""


class OptionError(FxpipeError):
    """An option of a command that cannot be read, or that does not fit the others."""
