"""The report on one or several runs: findings, tables, figures and the page."""
