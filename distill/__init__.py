"""Distillation: divergences between a student and its teacher, and what a teacher has to answer.

Pure tensor functions, like ``algos``; the class that loads a teacher is ``trainer.teacher``'s.
"""
