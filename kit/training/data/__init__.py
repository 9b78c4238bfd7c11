"""Tokenised data: the same samples in the same order for every engine and layout.

Its rooms, in the order in which data walks:

    sources, stream_source        rows of files, saved sets and object storage
    tokenizers, chat_template, segments, tokenize_rows
                                  rows → tokens
    tokenise, indexed_writer      ``kit convert data``
    prepared                      raw rows of a recipe, tokenised once
    indexed_files, indexed, fine_tuning_rows
                                  the files, documents and rows of a set
    samples, shuffle, blend       samples of one set or several, in their order
    stream                        samples of text that is tokenised while the run trains
    loader                        micro batches of a rank, step by step
"""
