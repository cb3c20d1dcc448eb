"""A run as one page that a person can keep: report.html, plots/*.png, and the description of the machine.

It reads what a run left in its directory and starts nothing; metrics and samples are written by
`miniverl.metrics`.
"""

from miniverl.report.environment import describe_environment
from miniverl.report.page import write_report

__all__ = ["describe_environment", "write_report"]
