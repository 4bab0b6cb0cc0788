"""Reports: explanations and pictures of calls, progress of builds, contents of caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepcache.report.explanation import Explanation

__all__ = ["plan_svg"]


def plan_svg(explanation: Explanation) -> str:
    """Draws the bytes that one call of a step moves for its `Variables`, and what sharing saves.

    On the left, each argument on each device fetches each value from its master copy. On the right
    is the plan: one transfer for each version of a variable and each memory, by its route. The
    width of an arrow shows the bytes. Values that do not move have no drawing.

    Args:
        explanation: from `step.explain(...)`.

    Returns:
        An SVG element that refers to nothing outside itself. Its colours follow the reader's
        choice of light or dark.

    Example:
        ```python
        svg = plan_svg(train_step.explain(state, batch))
        ```
    """
    from stepcache.report.picture import draw  # Few programs draw, and the import takes 15 ms.

    return draw(explanation.step, explanation.mesh, explanation.plan, explanation.moved_bytes)
