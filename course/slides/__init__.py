"""`make slides`: what a lecturer projects for 90 minutes, in one HTML file."""
