"""Training data: conversion of text to Megatron's token files, the embedded corpus, and re-readable batches."""
