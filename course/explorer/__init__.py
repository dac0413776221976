"""The explorer: one HTML page with sliders that states the figures of `lab.plan` and shows a step of the engines.

`make site` writes it. It computes in the browser and asks no server for anything.

    formulas.js    lab/plan/formulas.py in JavaScript, name by name
    explorer.js    sliders, bars, the setting in the address
    explorer.css   on top of the lesson pages' own
    body.html      the page's text
    page.py        all of it in one file, with the planner's constants and the steps that were recorded
"""
