"""The figures of the documentation: what measures those that ``linattn bench`` does not, and what writes them into pages.

For a checkout, and no part of what is installed. Files of results lie in :data:`RESULTS`.
"""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
