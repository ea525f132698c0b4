"""
Schedulers of other papers, and the models by which these choose: for comparison.

`cyclic` is PARALiA's, with `paralia`, `bands` is Choi's, with `choi`, and `parsec` is PaRSEC's; `cubes` is what the
Uncut-GEMMs paper does out of core. The first three are installed as `uncut_mpi.planning.others` has it, so plans find
them by their names. A search never tries them.
"""
