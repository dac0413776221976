"""The explorer: one HTML page with sliders that states the figures of `lab.plan` and shows a step of the engines."""
