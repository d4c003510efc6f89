"""Multi-turn conversations: conversion between messages and token ids that never tokenizes a
sampled completion again.
"""
