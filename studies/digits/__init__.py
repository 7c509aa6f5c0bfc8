"""The main job: four optimizers side by side on the digits (`python -m studies.digits`)."""
