"""The launcher for Ray: a server is an actor, and so is the coordinator.

Ray prints a paragraph for every worker that dies. The launcher says the same in one line (`log_views`, or
`bml run`), so Ray's paragraph is hidden, unless the user has set what Ray hides. Ray reads this setting only
while it is imported, so the setting is in this process's environment only then.
"""

import os
from importlib import import_module

HIDDEN = "^A worker died or was killed while executing a task"
_SETTING = "RAY_DEDUP_LOGS_SKIP_REGEX"

if _SETTING not in os.environ:
    os.environ[_SETTING] = HIDDEN
    try:
        import_module("ray")
    finally:
        del os.environ[_SETTING]
