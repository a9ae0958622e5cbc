/* An engine of kvspec in C99: the families `diversity` and `nestedkv`, and three published methods, in float64.
 *
 *     cc -O2 -std=c99 engine.c -o engine -lm
 *     kvspec verify --command ./engine
 *     kvspec verify --command ./engine --as snapkv,keydiff,knorm
 *
 * It reads requests and writes answers as spec/protocol.md has them. Names like DV-GREEDY are items of
 * spec/diversity.md, spec/nestedkv.md and spec/policies.md, which say what each function must do.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma STDC FP_CONTRACT OFF /* DV-COSINE: no fused multiply-add */

#define SPEC "0.4.1"
#define MOST_AXES 8

/* ---- memory and ends of a request ---- */

static jmp_buf next_request; /* where a refusal or a failure goes on */
static const char *id = "0"; /* of the request that is answered */
static void **blocks;
static size_t used, room;

/* Memory that is free again when the request is answered. */
static void *take(size_t count, size_t size) {
    void *block = calloc(count + 1, size);
    if (used == room) {
        room = 2 * room + 64;
        blocks = realloc(blocks, room * sizeof *blocks);
    }
    if (block == NULL || blocks == NULL) {
        fprintf(stderr, "out of memory: %zu times %zu bytes\n", count, size);
        exit(1);
    }
    return blocks[used++] = block;
}

static void free_all(void) {
    while (used > 0)
        free(blocks[--used]);
}

/* The engine failed: text without quotes. */
static void fail(const char *text) {
    printf("{\"id\": %s, \"error\": \"%s\"}\n", id, text);
    longjmp(next_request, 1);
}

/* The request is refused: the argument, what came for it as JSON, and the bound as printf has it. */
static void refuse(const char *argument, const char *value, const char *bound, ...) {
    va_list rest;
    printf("{\"id\": %s, \"refusal\": {\"argument\": \"%s\", \"value\": %s, \"bound\": \"", id, argument, value);
    va_start(rest, bound);
    vprintf(bound, rest);
    va_end(rest);
    printf("\"}}\n");
    longjmp(next_request, 1);
}

/* ---- JSON ---- */

typedef struct Node {
    char type;          /* { [ " or, for a number, true, false and null, their first letter */
    const char *name;   /* inside an object */
    const char *text;   /* of what is no object or array */
    struct Node *first; /* child */
    struct Node *next;  /* beside it */
} Node;

static char *at; /* the next character of the line */

static void skip_spaces(void) {
    at += strspn(at, " \t\r\n");
}

/* Text up to its closing quote, which becomes its end. No text that an engine must read has a backslash. */
static char *quoted(void) {
    char *text = ++at;
    at += strcspn(at, "\"\\");
    if (*at != '"')
        fail("text that does not end, or has a backslash");
    *at++ = '\0';
    return text;
}

static Node *parsed(void);

/* What stands between brackets. */
static Node *children(char end) {
    Node *first = NULL, **last = &first;
    at++;
    for (skip_spaces(); *at != end; skip_spaces()) {
        const char *name = NULL;
        if (end == '}') {
            if (*at != '"')
                fail("an object without names");
            name = quoted();
            skip_spaces();
            if (*at++ != ':')
                fail("a name without a value");
        }
        *last = parsed();
        (*last)->name = name;
        last = &(*last)->next;
        skip_spaces();
        if (*at == ',')
            at++;
        else if (*at != end)
            fail("no comma where one is needed");
    }
    at++;
    return first;
}

static Node *parsed(void) {
    Node *node = take(1, sizeof *node);
    skip_spaces();
    node->type = *at;
    node->text = "";
    if (*at == '{')
        node->first = children('}');
    else if (*at == '[')
        node->first = children(']');
    else if (*at == '"')
        node->text = quoted();
    else {
        size_t length = strcspn(at, " ,]}\r\n");
        char *text = take(length + 1, 1);
        if (length == 0)
            fail("a value is missing");
        node->text = memcpy(text, at, length);
        at += length;
    }
    return node;
}

/* A member of an object. */
static Node *member(const Node *object, const char *name) {
    for (Node *node = object->first; node != NULL; node = node->next)
        if (node->name != NULL && strcmp(node->name, name) == 0)
            return node;
    fail("a member is missing in the request");
    return NULL;
}

/* ---- values: spec/protocol.md, section "Values" ---- */

typedef struct {
    char kind; /* f, i or b: floats, integers, bools */
    int rank;
    size_t shape[MOST_AXES];
    size_t size;
    double *x; /* the last axis fastest */
} Array;

/* f for text with a point of a float, i for an integer as number or text, b for true and false. */
static char kind_of(const Node *node) {
    if (node->type == 't' || node->type == 'f')
        return 'b';
    if (node->type != '"')
        return 'i';
    return strpbrk(node->text, "xna") != NULL ? 'f' : 'i'; /* 0x..., nan, inf */
}

static double real(const Node *node) {
    if (node->type == '{' || node->type == '[' || node->type == 'n')
        fail("a number is missing");
    return node->type == 't' ? 1 : node->type == 'f' ? 0 : strtod(node->text, NULL); /* reads 0x1.8p+0, nan and -inf */
}

static long long whole(const Node *node) {
    if (node->type == '{' || node->type == '[' || kind_of(node) != 'i')
        fail("an integer is missing");
    return strtoll(node->text, NULL, 10);
}

/* The leaves of lists in lists, in order; every list of an axis must be of one length. */
static void fill(const Node *node, Array *array, int axis) {
    size_t length = 0;
    if (axis == array->rank) {
        if (node->type == '[')
            fail("lists of several depths");
        array->kind = array->size == 0 ? kind_of(node) : array->kind;
        array->x[array->size++] = real(node);
        return;
    }
    if (node->type != '[')
        fail("lists of several depths");
    for (const Node *child = node->first; child != NULL; child = child->next, length++)
        fill(child, array, axis + 1);
    if (length != array->shape[axis])
        fail("lists of several lengths");
}

static Array from_lists(const Node *node) {
    Array array = {'f', 0, {0}, 0, NULL};
    size_t size = 1;
    for (const Node *list = node; list != NULL && list->type == '['; list = list->first) {
        if (array.rank == MOST_AXES)
            fail("too many axes");
        for (const Node *child = list->first; child != NULL; child = child->next)
            array.shape[array.rank]++;
        size *= array.shape[array.rank++];
    }
    array.x = take(size, sizeof(double));
    fill(node, &array, 0);
    return array;
}

/* The bytes of base64, in place. */
static unsigned char *bytes_of(const char *text, size_t *length) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static signed char value[256];
    unsigned char *bytes = take(strlen(text), 1);
    unsigned held = 0, bits = 0;
    for (int digit = 0; digit < 64; digit++)
        value[(unsigned char)digits[digit]] = (signed char)digit;
    for (*length = 0; *text != '\0' && *text != '='; text++) {
        held = held << 6 | (unsigned)value[(unsigned char)*text];
        if ((bits += 6) >= 8)
            bytes[(*length)++] = (unsigned char)(held >> (bits -= 8));
    }
    return bytes;
}

/* One number from its bytes, the lowest first. */
static double number_at(const unsigned char *bytes, const char *dtype, size_t width) {
    uint64_t wide = 0;
    uint32_t narrow;
    double x;
    float y;
    for (size_t byte = width; byte-- > 0;)
        wide = wide << 8 | bytes[byte];
    narrow = (uint32_t)wide;
    memcpy(&x, &wide, sizeof x);
    memcpy(&y, &narrow, sizeof y);
    return dtype[0] != 'f' ? (double)(int64_t)wide : width == 8 ? x : y;
}

static Array from_bytes(const Node *node) {
    const char *dtype = member(node, "dtype")->text;
    Array array = {dtype[0], 0, {0}, 1, NULL};
    size_t width = strcmp(dtype, "float32") == 0 ? 4 : strcmp(dtype, "bool") == 0 ? 1 : 8, length;
    unsigned char *bytes = bytes_of(member(node, "base64")->text, &length);
    for (const Node *size = member(node, "shape")->first; size != NULL; size = size->next) {
        if (array.rank == MOST_AXES)
            fail("too many axes");
        array.size *= array.shape[array.rank++] = (size_t)whole(size);
    }
    if (array.size * width != length)
        fail("base64 of another length than its shape");
    array.x = take(array.size, sizeof(double));
    for (size_t i = 0; i < array.size; i++)
        array.x[i] = number_at(bytes + i * width, dtype, width);
    return array;
}

static Array array_of(const Node *node) {
    if (node->type != '{' && node->type != '[')
        fail("an array is missing");
    return node->type == '{' ? from_bytes(node) : from_lists(node);
}

/* A shape as JSON, for refusals. */
static const char *shape_of(const Array *array) {
    char *text = take(32 * MOST_AXES, 1);
    strcpy(text, "[");
    for (int axis = 0; axis < array->rank; axis++)
        sprintf(text + strlen(text), "%s%zu", axis > 0 ? ", " : "", array->shape[axis]);
    return strcat(text, "]");
}

/* A float as JSON: text that is read to the bit. */
static const char *float_of(double x) {
    char *text = take(40, 1);
    sprintf(text, isnan(x) ? "\"nan\"" : "\"%a\"", x);
    return text;
}

static void refuse_not_finite(const char *argument, const Array *array) {
    for (size_t i = 0; i < array->size; i++)
        if (!isfinite(array->x[i]))
            refuse(argument, float_of(array->x[i]), "must be finite, and is not at place %zu", i);
}

/* ---- diversity ---- */

/* m_i = max(m_i, cos(v_i, v_j)) for every i. DV-COSINE: products are added from the first channel to the last. */
static void raise_similarity(double *m, const Array *V, size_t j) {
    size_t d = V->shape[1];
    for (size_t i = 0; i < V->shape[0]; i++) {
        double dot = 0;
        for (size_t c = 0; c < d; c++)
            dot += V->x[i * d + c] * V->x[j * d + c];
        if (dot > m[i])
            m[i] = dot;
    }
}

/* DV-GREEDY. `in` holds S, which grows to k tokens; the first of equal gains goes in. */
static void grow(const Array *s, const Array *V, double *in, size_t held, size_t k, double lam) {
    size_t n = s->size, best;
    double *m = take(n, sizeof *m);
    for (size_t j = 0; j < n; j++)
        if (in[j])
            raise_similarity(m, V, j);
    for (; held < k; held++) {
        double most = 0;
        best = n;
        for (size_t i = 0; i < n; i++) {
            double gain = (isnan(s->x[i]) ? -INFINITY : s->x[i]) - lam * m[i];
            if (!in[i] && (best == n || gain > most)) {
                best = i;
                most = gain;
            }
        }
        in[best] = 1;
        raise_similarity(m, V, best);
    }
}

static void diverse(const Node *arguments) {
    Array s = array_of(member(arguments, "s")), V = array_of(member(arguments, "V"));
    Array retained = array_of(member(arguments, "retained"));
    long long k = whole(member(arguments, "k"));
    double lam = real(member(arguments, "lam"));
    size_t n = s.size, held = 0;
    const char *comma = "";
    if (!isfinite(lam) || lam < 0)
        refuse("lam", float_of(lam), "must be finite and not negative");
    if (V.rank != 2 || V.shape[0] != n)
        refuse("V", shape_of(&V), "must have a row for each of %zu scores", n);
    refuse_not_finite("V", &V);
    if (retained.size != n)
        fail("retained must say of every token whether it is");
    for (size_t i = 0; i < n; i++)
        held += retained.x[i] != 0;
    if (k < 0 || (size_t)k > n || (size_t)k < held)
        refuse("k", member(arguments, "k")->text, "must be from the %zu retained tokens to all %zu", held, n);
    grow(&s, &V, retained.x, held, (size_t)k, lam);
    printf("{\"id\": %s, \"result\": [", id);
    for (size_t i = 0; i < n; i++)
        if (retained.x[i]) {
            printf("%s%zu", comma, i);
            comma = ", ";
        }
    printf("]}\n");
}

/* ---- nestedkv ---- */

#define SCALES 3 /* stable, episodic, current */
static const double NEGLIGIBLE = 1.0 / 65536;

typedef struct {
    size_t b_min, b_max, blocks, W;
    long long share[2]; /* p, as numerator and denominator */
    double w0[SCALES], beta, tau, kappa;
} Parameters;

static Parameters parameters_of(const Node *given) {
    Parameters p = {(size_t)whole(member(given, "b_min")), (size_t)whole(member(given, "b_max")),
                    (size_t)whole(member(given, "blocks")), (size_t)whole(member(given, "W")), {0, 0}, {0},
                    real(member(given, "beta")), real(member(given, "tau")), real(member(given, "kappa"))};
    const Node *weight = member(given, "w0")->first;
    for (int scale = 0; scale < SCALES && weight != NULL; scale++, weight = weight->next)
        p.w0[scale] = real(weight);
    if (sscanf(member(given, "p")->text, "%lld/%lld", &p.share[0], &p.share[1]) != 2 || p.share[1] >> 61 > 0)
        fail("p must be a fraction with a denominator below 2^61");
    return p;
}

/* floor(share n) for a share of at most 1: long multiplication, which nothing overflows. */
static size_t share_of(const long long share[2], size_t n) {
    size_t quotient = 0;
    long long rest = 0;
    for (int bit = 62; bit >= 0; bit--) {
        quotient *= 2;
        rest = 2 * rest + (n >> bit & 1 ? share[0] : 0);
        for (; rest >= share[1]; rest -= share[1])
            quotient++;
    }
    return quotient;
}

/* NK-UNIT-KEYS, in place. A power of two brings the largest channel to [0.5, 1), so that no square overflows. */
static void unit_keys(Array *k) {
    size_t n = k->shape[1], d = k->shape[2];
    for (size_t row = 0; row < k->shape[0] * n; row++) {
        double square = 0, largest = 0, *key = k->x + row * d;
        int exponent;
        for (size_t c = 0; c < d; c++)
            largest = fmax(largest, fabs(key[c]));
        if (largest == 0)
            refuse("k", "\"0x0p+0\"", "a zero key has no direction: KV head %zu, token %zu", row / n, row % n);
        frexp(largest, &exponent);
        for (size_t c = 0; c < d; c++) {
            key[c] = ldexp(key[c], -exponent);
            square += key[c] * key[c];
        }
        for (size_t c = 0; c < d; c++)
            key[c] /= sqrt(square);
    }
}

/* The mean of the unit keys from `start` to `end`, which is excluded. */
static void mean_of(const double *unit, size_t start, size_t end, size_t d, double *mean) {
    memset(mean, 0, d * sizeof *mean);
    for (size_t j = start; j < end; j++)
        for (size_t c = 0; c < d; c++)
            mean[c] += unit[j * d + c];
    for (size_t c = 0; c < d; c++)
        mean[c] /= (double)(end - start);
}

/* NK-ANOMALY. */
static double anomaly(const double *key, const double *memory, size_t d) {
    double dot = 0, square = 0;
    for (size_t c = 0; c < d; c++) {
        dot += key[c] * memory[c];
        square += memory[c] * memory[c];
    }
    return sqrt(square) > NEGLIGIBLE ? -dot / sqrt(square) : 0;
}

/* NK-MIN-MAX, in place. */
static void min_max(double *a, size_t n) {
    double low = a[0], high = a[0];
    for (size_t i = 1; i < n; i++) {
        low = a[i] < low ? a[i] : low;
        high = a[i] > high ? a[i] : high;
    }
    for (size_t i = 0; i < n; i++)
        a[i] = high - low > NEGLIGIBLE ? (a[i] - low) / (high - low) : 0;
}

/* NK-STABLE, NK-EPISODIC and NK-CURRENT: what each says of each token, moved to [0, 1]. */
static void readings(const double *unit, size_t n, size_t d, const Parameters *p, double *a[SCALES]) {
    size_t b = n / p->blocks;
    double *memory = take(SCALES * d, sizeof *memory);
    b = b < p->b_min ? p->b_min : b > p->b_max ? p->b_max : b;
    mean_of(unit, 0, n, d, memory);
    for (size_t i = 0; i < n; i++) {
        if (i % b == 0)
            mean_of(unit, i, i + b < n ? i + b : n, d, memory + d);
        mean_of(unit, i + 1 > p->W ? i + 1 - p->W : 0, i + 1, d, memory + 2 * d);
        for (int scale = 0; scale < SCALES; scale++)
            a[scale][i] = anomaly(unit + i * d, memory + (size_t)scale * d, d);
    }
    for (int scale = 0; scale < SCALES; scale++)
        min_max(a[scale], n);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* NK-GAP. */
static double gap(const double *a, size_t n, size_t m) {
    double *ordered = take(n, sizeof *ordered), top = 0, bottom = 0;
    memcpy(ordered, a, n * sizeof *ordered);
    qsort(ordered, n, sizeof *ordered, ascending);
    for (size_t i = 0; i < m; i++) {
        top += ordered[n - 1 - i];
        bottom += ordered[i];
    }
    return top / (double)m - bottom / (double)m;
}

/* NK-BLEND: the weights of the scales in one head. */
static void weights(double *a[SCALES], size_t n, const Parameters *p, double w[SCALES]) {
    size_t m = share_of(p->share, n);
    double total = 0, most = 0;
    for (int scale = 0; scale < SCALES; scale++)
        most = fmax(most, w[scale] = p->beta * gap(a[scale], n, m > 0 ? m : 1));
    /* What is common to all goes where exp would overflow. */
    for (int scale = 0; scale < SCALES; scale++)
        total += w[scale] = p->w0[scale] * exp(w[scale] - fmax(0, most - 700));
    for (int scale = 0; scale < SCALES; scale++)
        w[scale] /= total;
}

/* NK-SURPRISE. */
static void surprise(double *a[SCALES], size_t n, double *s) {
    double total = 0;
    for (size_t i = 0; i < n; i++) {
        double mean = (a[0][i] + a[1][i] + a[2][i]) / SCALES, square = 0;
        for (int scale = 0; scale < SCALES; scale++)
            square += (a[scale][i] - mean) * (a[scale][i] - mean);
        s[i] = sqrt(square / SCALES);
    }
    min_max(s, n);
    for (size_t i = 0; i < n; i++)
        total += s[i];
    for (size_t i = 0; i < n; i++)
        s[i] = s[i] > total / (double)n ? s[i] - total / (double)n : 0;
}

/* NK-SCORE of one head; NK-ROUTE at its end. */
static void score(const double *unit, size_t n, size_t d, const Parameters *p, double *found) {
    double *a[SCALES], w[SCALES], *s = take(n, sizeof *s);
    for (int scale = 0; scale < SCALES; scale++)
        a[scale] = take(n, sizeof *a[scale]);
    readings(unit, n, d, p, a);
    weights(a, n, p, w);
    surprise(a, n, s);
    for (size_t i = 0; i < n; i++) {
        double alpha = 1 / (1 + exp(-p->kappa * (s[i] - p->tau)));
        double blend = w[0] * a[0][i] + w[1] * a[1][i] + w[2] * a[2][i];
        found[i] = (1 - alpha) * blend + alpha * fmax(a[0][i], fmax(a[1][i], a[2][i]));
    }
}

static void anomaly_score(const Node *arguments) {
    Array k = array_of(member(arguments, "k"));
    Parameters p = parameters_of(member(arguments, "parameters"));
    size_t n = k.shape[1], d = k.shape[2];
    double *found;
    if (k.rank != 3 || k.kind != 'f' || k.size == 0)
        refuse("k", shape_of(&k), "must hold floats (KV heads, tokens, channels), at least one of each");
    refuse_not_finite("k", &k);
    unit_keys(&k);
    found = take(n, sizeof *found);
    printf("{\"id\": %s, \"result\": [", id);
    for (size_t head = 0; head < k.shape[0]; head++) {
        score(k.x + head * n * d, n, d, &p, found);
        for (size_t i = 0; i < n; i++)
            printf("%s\"%a\"", i > 0 ? ", " : head > 0 ? "], [" : "[", found[i]);
    }
    printf("]]}\n");
}

/* ---- methods ---- */

typedef struct {
    double score;
    size_t token;
} Scored;

/* The higher score first, then the lower position. */
static int better(const void *a, const void *b) {
    const Scored *x = a, *y = b;
    if (x->score != y->score)
        return x->score < y->score ? 1 : -1;
    return x->token < y->token ? -1 : 1;
}

/* PO-TOP-UNITS: marks the `number` tokens with the highest scores, or all n. */
static void mark_best(const double *score, size_t n, size_t number, char *kept) {
    Scored *order = take(n, sizeof *order);
    for (size_t i = 0; i < n; i++)
        order[i].score = score[i], order[i].token = i;
    qsort(order, n, sizeof *order, better);
    for (size_t i = 0; i < n && i < number; i++)
        kept[order[i].token] = 1;
}

/* A Selection from marks of g kept sets. */
static void print_selection(const char *kept, size_t g, size_t n) {
    const char *comma = "";
    size_t total = 0;
    printf("{\"id\": %s, \"result\": {\"positions\": [", id);
    for (size_t i = 0; i < g * n; i++)
        if (kept[i]) {
            printf("%s%zu", comma, i % n);
            comma = ", ";
        }
    printf("], \"offsets\": [0");
    for (size_t i = 0; i < g * n; i++) {
        total += (size_t)kept[i];
        if (i % n == n - 1)
            printf(", %zu", total);
    }
    printf("]}}\n");
}

static double dot(const double *x, const double *y, size_t d) {
    double sum = 0;
    for (size_t c = 0; c < d; c++)
        sum += x[c] * y[c];
    return sum;
}

/* PO-KNORM and PO-KEYDIFF: k is (L, H_kv, n, d), and each head has a kept set. */
static void by_keys(const Node *arguments, int of_direction) {
    Array k = array_of(member(arguments, "k"));
    size_t g = k.shape[0] * k.shape[1], n = k.shape[2], d = k.shape[3], B = (size_t)whole(member(arguments, "B"));
    double *score = take(n, sizeof *score), *mean = take(d, sizeof *mean);
    char *kept = take(g * n, 1);
    Array heads = {'f', 3, {g, n, d}, k.size, k.x};
    if (of_direction)
        unit_keys(&heads);
    for (size_t head = 0; head < g; head++) {
        const double *keys = k.x + head * n * d;
        mean_of(keys, 0, n, d, mean);
        for (size_t i = 0; i < n; i++) {
            const double *key = keys + i * d;
            double length = sqrt(of_direction ? dot(mean, mean, d) : dot(key, key, d));
            score[i] = !of_direction ? -length : length > 0 ? -dot(key, mean, d) / length : 0;
        }
        mark_best(score, n, B, kept + head * n);
    }
    print_selection(kept, g, n);
}

typedef struct {
    double scaling, softcap, sink; /* NAN: no soft cap; -INFINITY: no sink */
    size_t d, past, window, kernel;
} Attention;

/* Adds the attention of query `row` of the window to the sums of the keys before it. */
static void attend(const Attention *a, const double *query, const double *keys, size_t row, double *sums) {
    size_t seen = a->past + row + 1;
    double *weight = take(seen, sizeof *weight), most = a->sink, total;
    for (size_t j = 0; j < seen; j++) {
        weight[j] = a->scaling * dot(query, keys + j * a->d, a->d);
        if (!isnan(a->softcap))
            weight[j] = a->softcap * tanh(weight[j] / a->softcap);
        most = fmax(most, weight[j]);
    }
    total = exp(a->sink - most);
    for (size_t j = 0; j < seen; j++)
        total += weight[j] = exp(weight[j] - most);
    for (size_t j = 0; j < a->past; j++)
        sums[j] += weight[j] / total;
}

/* PO-SNAPKV of one query head: adds the pooled sums to the score of its KV head. queries: those of the window. */
static void observe(const Attention *a, const double *queries, const double *keys, double *score) {
    double *sums = take(a->past, sizeof *sums);
    for (size_t row = 0; row < a->window; row++)
        attend(a, queries + row * a->d, keys, row, sums);
    for (size_t j = 0; j < a->past; j++) {
        double most = 0;
        for (size_t i = j > a->kernel / 2 ? j - a->kernel / 2 : 0; i < a->past && i <= j + a->kernel / 2; i++)
            most = fmax(most, sums[i]);
        score[j] += most; /* a sum over the group keeps what its mean keeps */
    }
}

static void snapkv(const Node *arguments) {
    Array k = array_of(member(arguments, "k")), q = array_of(member(arguments, "q"));
    size_t g = k.shape[0] * k.shape[1], n = k.shape[2], d = k.shape[3], m = q.shape[2];
    size_t group = q.shape[1] / k.shape[1], B = (size_t)whole(member(arguments, "B"));
    size_t W = (size_t)whole(member(arguments, "W")), window = W < n ? W : n;
    const Node *softcap = member(arguments, "softcap"), *sinks = member(arguments, "sinks");
    const double *sink = sinks->type == 'n' ? NULL : array_of(sinks).x;
    Attention a = {real(member(arguments, "scaling")), softcap->type == 'n' ? NAN : real(softcap), -INFINITY, d,
                   n - window, window, (size_t)whole(member(arguments, "kernel"))};
    char *kept = take(g * n, 1);
    for (size_t head = 0; head < g; head++) {
        double *score = take(n, sizeof *score);
        for (size_t h = head * group; h < (head + 1) * group; h++) {
            a.sink = sink ? sink[h] : -INFINITY;
            observe(&a, q.x + (h * m + m - window) * d, k.x + head * n * d, score);
        }
        mark_best(score, a.past, B > window ? B - window : 0, kept + head * n);
        memset(kept + head * n + a.past, 1, window);
    }
    print_selection(kept, g, n);
}

/* ---- requests ---- */

static void hello(void) {
    printf("{\"id\": %s, \"result\": {\"protocol\": 1, \"spec\": \"" SPEC "\", ", id);
    printf("\"name\": \"c99\", \"version\": \"1.1\", \"precision\": \"float64\", ");
    printf("\"families\": {\"diversity\": [\"diverse\"], \"nestedkv\": [\"anomaly_score\"], ");
    printf("\"methods\": [\"snapkv\", \"keydiff\", \"knorm\"]}}}\n");
}

static void answer(char *line) {
    const Node *request;
    const char *op;
    at = line;
    request = parsed();
    id = member(request, "id")->text;
    op = member(request, "op")->text;
    if (strcmp(op, "hello") == 0)
        hello();
    else if (strcmp(op, "diversity.diverse") == 0)
        diverse(member(request, "arguments"));
    else if (strcmp(op, "nestedkv.anomaly_score") == 0)
        anomaly_score(member(request, "arguments"));
    else if (strcmp(op, "methods.snapkv") == 0)
        snapkv(member(request, "arguments"));
    else if (strcmp(op, "methods.keydiff") == 0 || strcmp(op, "methods.knorm") == 0)
        by_keys(member(request, "arguments"), strcmp(op, "methods.keydiff") == 0);
    else
        fail("no such operation");
}

/* The next line of standard input without its end; NULL where there is none. */
static char *next_line(void) {
    static char *line;
    static size_t size;
    size_t length = 0;
    int c;
    while ((c = getchar()) != EOF && c != '\n') {
        if (length + 1 >= size && (line = realloc(line, size = 2 * size + 4096)) == NULL)
            exit(1);
        line[length++] = (char)c;
    }
    if (length == 0)
        return NULL;
    line[length] = '\0';
    return line;
}

int main(void) {
    char *line;
    while ((line = next_line()) != NULL) {
        if (setjmp(next_request) == 0)
            answer(line);
        fflush(stdout);
        free_all();
        id = "0";
    }
    return 0;
}
