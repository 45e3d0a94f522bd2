"""Pipeline schedules: actions, orders, policies, memory and their simulation (pure), and their execution (torch)."""
