"""The command `headrace` trains, evaluates and simulates, shows results of runs, manages pools of GPUs, and measures.

Exit codes: 0 success, 1 failure, 2 user error (each error reported in one sentence, without a traceback), 130
interrupted (Ctrl-C), 143 terminated (SIGTERM). Heavy packages (torch, ray, transformers, matplotlib) are imported only
by the commands that need them.
"""

from .command import main

__all__ = ["main"]
