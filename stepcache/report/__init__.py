"""What people look at: explanations of calls, pictures of them, and the progress of long builds."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepcache.report.picture import plan_svg

__all__ = ["plan_svg"]


def __getattr__(name: str) -> Any:
    # Few programs draw: importing stepcache does not load what draws, about 15 ms.
    if name != "plan_svg":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stepcache.report.picture import plan_svg

    return plan_svg
