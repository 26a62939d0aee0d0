"""A plug-in of pytest's: what became of each case, written as it ends to the file ``JUDGED_JOURNAL``, in JSON, a line each.

A line holds pytest's name of the case, how it ended (passed, failed, skipped) and why, if it did not pass. A case that was
collected is there from the beginning, as one that did not run; its last line counts. With processes side by side the one that
started them writes.
"""

import json
import os
from pathlib import Path

import pytest

NOT_RUN = "not run: no time was left"
"""Why a case was skipped that had not ended."""


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # which pytest-xdist gives to the processes that it starts
        config.pluginmanager.register(Journal(Path(os.environ["JUDGED_JOURNAL"])))


class Journal:
    def __init__(self, path):
        self.path = path

    def pytest_sessionstart(self):
        self.write()

    def pytest_collection_finish(self, session):
        self.write(*([item.nodeid, "skipped", NOT_RUN] for item in session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        if node.gateway.id == "gw0":
            self.write(*([name, "skipped", NOT_RUN] for name in ids))

    def pytest_collectreport(self, report):
        if report.failed:
            self.write([report.nodeid, "failed", message(report)])

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.write([report.nodeid, report.outcome, "" if report.passed else message(report)])

    def write(self, *lines):
        with self.path.open("a") as journal:
            journal.writelines(json.dumps(line) + "\n" for line in lines)


def message(report):
    """Why a case failed or was skipped."""
    why = report.longrepr
    if isinstance(why, tuple):
        return why[2].removeprefix("Skipped: ")
    crash = getattr(why, "reprcrash", None)
    return crash.message if crash else getattr(report, "wasxfail", str(why))
