"""The command ``hpcaccum bench``: the cost of each way to exchange gradients."""
