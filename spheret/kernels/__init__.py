"""One operation, `retract`, on several backends; dispatch.py chooses between them."""

from spheret.kernels.dispatch import (
    BACKENDS,
    check_cap,
    check_environment,
    check_rows,
    chosen,
    compute_dtype,
    normalize,
    retract,
    retract_unchecked,
    serving,
    use,
)

__all__ = [
    "BACKENDS",
    "check_cap",
    "check_environment",
    "check_rows",
    "chosen",
    "compute_dtype",
    "normalize",
    "retract",
    "retract_unchecked",
    "serving",
    "use",
]
