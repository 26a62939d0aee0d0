"""Runs the scripts beside this file, each in a process of its own that has Triton's compiler imported when it begins.

Reads a line of JSON for each, ``[script, argument, ...]``, and writes one: ``[exit status, what it printed, errors]``.
"""

import gc
import importlib
import json
import os
import sys
import tempfile
import traceback

import compile_for_hopper  # noqa: F401  imported once, with PyTorch, Triton and the kernels, for all processes
import quick_compiler


def run(script, *arguments):
    """The exit status of a script, which prints to two files, and what is in them."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = os.fork()
        if not process:
            os.dup2(printed.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os._exit(status_of(script, arguments))
        _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status), written(printed), written(errors)


def status_of(script, arguments):
    """Run the script in this process."""
    sys.argv = [script, *arguments]
    try:
        importlib.import_module(script.removesuffix(".py")).main()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def written(file):
    file.seek(0)
    return file.read()


def main():
    quick_compiler.quicken()
    gc.freeze()
    gc.set_threshold(100_000)  # a tree of code is no garbage yet, and looking for some takes a fifth of all time
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
