"""Finds the fastest legal layout that fits a model, a cluster and a job, and gives the reasons."""
