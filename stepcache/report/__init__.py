"""What people look at: explanations of calls, and the progress of long builds."""
