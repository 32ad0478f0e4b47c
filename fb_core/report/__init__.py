"""What runs found: findings, tables, figures and the page."""
