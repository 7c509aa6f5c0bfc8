"""The retraction laboratory: accuracy, drift and cost of retractions."""
