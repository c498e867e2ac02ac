"""The dashboard: shows the folders of runs in a browser.

It reads the files that runs write, and changes none of them. A leaf: only `commands/view.py` imports it.

index                          metrics.jsonl and samples.jsonl in a database; each line is read once
run_files, runs                one run's other files, and all runs below the folders on the command line
charts, samples, machine       the data behind each page
findings                       the diagnosis: common problems of RL runs, with thresholds and advice
answers                        all of this as JSON
server, export                 the page, served over HTTP or exported as one HTML file
"""
