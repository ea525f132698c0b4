"""
Schedulers of other papers, and the models by which these choose: for comparison.

`cyclic` is PARALiA's, with `paralia`, `bands` is Choi's, with `choi`, and `parsec` is PaRSEC's. A search never tries
them; they plan when named.
"""
