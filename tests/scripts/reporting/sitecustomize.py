"""Found by Python at the start of each script's process: writes, at its end, what its steps did.

The scripts themselves stay as people write them and start them: `python script.py`.
"""

import atexit
import json
import os
import sys
from pathlib import Path


def report() -> None:
    """Writes one record for each program that the process came by, in order."""
    if "stepcache" not in sys.modules:
        return
    from stepcache.events import BuildFailed, Built, Loaded, recorder

    programs = []
    for event in recorder.recent(object):
        if isinstance(event, Built | Loaded):
            how = event.source if isinstance(event, Loaded) else "compiled"
            about = {"step": event.step, "how": how, "miss": str(event.miss)}
            programs.append(about | {"reason": event.miss.reason})
    failures = [str(event) for event in recorder.recent(BuildFailed)]
    record = {"programs": programs, "failures": failures}
    Path(os.environ["STEPCACHE_TEST_REPORT"]).write_text(json.dumps(record))


atexit.register(report)
