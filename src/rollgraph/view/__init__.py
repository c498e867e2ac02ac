"""The run page: looks at the folders of runs and shows them in a browser.

It reads what runs write and changes nothing. No other part of the package knows it: only commands start it.

growing_lines, index_store, indexed_file      files that grow: each line is read once
metrics_index, samples_index                  what is kept of them: columns of numbers, and where each group is
run_files, run_data, catalog                  one run, and all runs in the folders that were named
series, sample_records, sample_search         charts and samples
metric_names, machine, comparison             what else there is to say
findings/, diagnosis                          what a good engineer would notice
answers                                       all of this as JSON
safety, events, routes, server, export        the page itself, served or in one file
"""
