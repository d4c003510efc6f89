"""Checkpoints on disk: conversion between Hugging Face folders and Megatron's distributed
checkpoints.
"""
