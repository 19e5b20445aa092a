"""Render the report of a run as one self-contained HTML page, and as a table for the terminal."""

from jobs.report_page.other_runs.hours_curve import hours_point
from jobs.report_page.page import render_report
from jobs.report_page.terminal import format_table

__all__ = ["format_table", "hours_point", "render_report"]
