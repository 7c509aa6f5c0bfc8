"""The retraction laboratory: what each way back to the set does, and what it costs."""
