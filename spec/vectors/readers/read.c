/* Read all vectors and check PO-KNORM, in C99 alone: `cc -std=c99 read.c -o read && ./read FILE ...` */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct Value { char kind, *key, *text; struct Value *kid, *next; } Value; /* kind: its first character */
static char *p; /* where the parser is */
static unsigned long long word(unsigned long long z, unsigned long long t) { /* word t of seed z: SplitMix64 */
    z += t * 0x9E3779B97F4A7C15u, z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u, z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static char *quoted(void) { /* the text between quotes, with its escapes */
    char *start = ++p;
    for (; *p != '"'; p++) p += *p == '\\';
    return *p++ = 0, start;
}
static Value *parse(void) { /* a number's text ends where it does */
    p += strspn(p, " \n,:");
    Value *v = calloc(1, sizeof *v), **end = &v->kid;
    v->kind = *p, v->text = p;
    if (v->kind == '"') return v->text = quoted(), v;
    if (v->kind != '{' && v->kind != '[') return p += strcspn(p, ",]} \n"), v;
    for (p++; p += strspn(p, " \n,"), *p != '}' && *p != ']'; end = &(*end)->next) {
        char *key = v->kind == '{' ? quoted() : ""; (*end = parse())->key = key; }
    return p++, v;
}
static Value *get(Value *v, const char *key) { for (v = v->kid; v && strcmp(v->key, key); ) v = v->next; return v; }
static Value *at(Value *v, size_t index) { for (v = v->kid; v && index--; ) v = v->next; return v; }
static size_t length(Value *v) { size_t n = 0; while (at(v, n)) n++; return n; }
static size_t integer(Value *v) { return strtoull(v->text, NULL, 10); }
static int holds(Value *inputs, Value *want) { /* PO-KNORM: the B smallest keys of each head, lower position first */
    Value *k = get(inputs, "k"), *of = get(k, "of"), *shape = get(k, "shape"), *row = at(at(k, 0), 0);
    size_t n = of ? integer(at(shape, 2)) : length(row), d = of ? integer(at(shape, 3)) : length(at(row, 0));
    size_t heads = of ? integer(at(shape, 1)) : length(at(k, 0)), B = integer(get(inputs, "B")), g, i, t, best; double square[n];
    for (g = 0; g < length(want); g++) {
        for (t = 0; t < n; t++) for (square[t] = 0, i = 0; i < d; i++) {
            Value *x = of ? at(of, word(integer(get(k, "seed")), (g * n + t) * d + i + 1) % length(of))
                          : at(at(at(at(k, g / heads), g % heads), t), i);
            square[t] += strtod(x->text, NULL) * strtod(x->text, NULL);
        }
        for (i = 0; i < B && i < n; square[best] = -1, i++) /* -1: kept */
            for (best = n, t = 0; t < n; t++) if (square[t] >= 0 && (best == n || square[t] < square[best])) best = t;
        for (i = 0, t = 0; t < n; t++) if (square[t] < 0) { Value *x = at(at(want, g), i++); if (!x || integer(x) != t) return 0; }
        if (at(at(want, g), i)) return 0;
    }
    return 1;
}
int main(int count, char **paths) {
    size_t read = 0, checked = 0, wrong = 0;
    for (FILE *file; --count; fclose(file)) {
        if (!(file = fopen(paths[count], "rb"))) return perror(paths[count]), 2;
        if (!fread(p = calloc(1 << 26, 1), 1, (1 << 26) - 1, file)) return perror(paths[count]), 2; /* up to 64 MiB */
        for (Value *group = get(parse(), "testGroups")->kid; group; group = group->next)
            for (Value *test = get(group, "tests")->kid; test; test = test->next, read++) {
                if (strcmp(get(group, "operation")->text, "PO-KNORM")) continue;
                int right = holds(get(test, "inputs"), get(get(test, "expected"), "kept"));
                checked++, wrong += !right, right || printf("tcId %zu is wrong\n", integer(get(test, "tcId")));
            }
    }
    return printf("%zu vectors read, %zu of PO-KNORM checked, %zu wrong\n", read, checked, wrong), wrong > 0;
}
