# runs that the paper's tables do not have
CELL = "reproduce --dataset openwebtext --size S "
ROWS = [
    ("reproduce", 2, "--dataset"),
    ("reproduce --dataset fineweb", 2, "fineweb-edu"),
    ("reproduce --dataset openwebtext --size XL", 2, "size"),
    (CELL + "--scheme post-ln", 2, "post-ln"),
    ("reproduce --all --reading inner", 2, "reading"),
    ("reproduce --all --scheme keel --reading inner-norm", 2, "geonorm"),
    ("reproduce --all --nproc 3", 2, "1, 2, 4"),
    (CELL + "--scheme keel --data nowhere", 2, "--out nowhere/openwebtext"),
]
