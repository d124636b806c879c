"""What people look at: tables, charts and traces of plans and timelines."""
