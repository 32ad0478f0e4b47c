"""What README, docs and the site show of result files: tables, plots and the event page."""
