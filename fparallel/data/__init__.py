"""Text to train on: byte-level corpora split by file, and batches that are a function of (key, step)."""

from fparallel.data.corpus import END_OF_FILE, VOCAB, Corpus, load_corpus
from fparallel.data.loader import Loader

__all__ = ["END_OF_FILE", "VOCAB", "Corpus", "Loader", "load_corpus"]
