"""Elastic experts (Lazarus): replicas as an expert's load asks for, placed so that lost nodes lose few experts.

Pure computations; source of algorithms and equations: Lazarus, section 4 and appendix A. No training uses them yet.
"""
