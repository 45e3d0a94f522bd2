"""Forwards at a smaller tensor parallel degree than their backwards: what is sent, and the weights, are cut to fit."""
