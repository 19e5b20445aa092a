"""The report of a run: one self-contained HTML page, and the table for the terminal."""

from jobs.report_page.page import render_report
from jobs.report_page.terminal import format_table

__all__ = ["format_table", "render_report"]
