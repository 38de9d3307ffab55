"""Will it fit? The memory ledger of one GPU, term by term, before anything is started."""
