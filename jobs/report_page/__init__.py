"""Render the report of a run as one self-contained HTML page, and as a table for the terminal."""

from jobs.report_page.other_runs import hours_point
from jobs.report_page.page import format_table, render_report

__all__ = ["format_table", "hours_point", "render_report"]
