/* Rescore a lattice by a larger grammar, find its best path, and the posteriors of arcs and words.

   rescoring.py says what is computed, and makes the errors of negative results. Costs are added in
   double precision and in one order, so that equal input gives equal bits. One thread. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* What the functions return in place of a count. */
enum { NO_MEMORY = -1, TOO_MANY_ARCS = -2, NO_PATH = -3, UNKNOWN_WORD = -4, BROKEN_GRAMMAR = -5 };

enum { MAX_BACKOFFS = 64, END_OF_SENTENCE = 0, FIRST_NODES = 1024 };

/* SEARCH_ARC; arcs are sorted by source, and lead to states of larger numbers. */
typedef struct {
    int32_t source, target, label, word;
    float graph_cost, acoustic_cost;
} Arc;

/* STATE and ARC of const_fst.py: an n-gram's history, and a word after it. */
typedef struct {
    float final_cost;
    uint32_t first_arc, num_arcs, num_input_epsilons, num_output_epsilons;
} History;

typedef struct {
    int32_t word, output_label;
    float cost;
    int32_t target;
} WordArc;

typedef struct {
    const History *histories;
    const WordArc *arcs;
    int64_t num_histories, num_arcs;
    int32_t start, backoff_word;
} Grammar;

typedef struct {
    double cost; /* infinite where the grammar has no such word */
    int32_t history, is_broken;
} Step;

static double cost_of(const Arc *arc) {
    return (double)arc->graph_cost + (double)arc->acoustic_cost;
}

/* Find a word among a history's arcs, which are sorted by word; NULL if it is not there. */
static const WordArc *word_arc(const Grammar *grammar, int32_t history, int32_t word) {
    const History *h = grammar->histories + history;
    const WordArc *arcs = grammar->arcs + h->first_arc;
    uint32_t low = 0, high = h->num_arcs;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (arcs[middle].word < word)
            low = middle + 1;
        else
            high = middle;
    }
    return low < h->num_arcs && arcs[low].word == word ? arcs + low : NULL;
}

static int is_sound(const Grammar *grammar, int32_t history) {
    if (history < 0 || history >= grammar->num_histories) return 0;
    const History *h = grammar->histories + history;
    return (int64_t)h->first_arc + h->num_arcs <= grammar->num_arcs;
}

/* Read a word, or the end of the sentence: back off until a history lists it. */
static Step read_word(const Grammar *grammar, int32_t history, int32_t word) {
    double cost = 0;
    for (int backoffs = 0; backoffs < MAX_BACKOFFS; backoffs++) {
        if (!is_sound(grammar, history)) return (Step){INFINITY, 0, 1};
        if (word == END_OF_SENTENCE) {
            const float final_cost = grammar->histories[history].final_cost;
            if (isfinite(final_cost)) return (Step){cost + (double)final_cost, 0, 0};
        } else {
            const WordArc *arc = word_arc(grammar, history, word);
            if (arc != NULL) return (Step){cost + (double)arc->cost, arc->target, 0};
        }
        const WordArc *backoff = word_arc(grammar, history, grammar->backoff_word);
        if (backoff == NULL) return (Step){INFINITY, 0, 0};
        cost += (double)backoff->cost;
        history = backoff->target;
    }
    return (Step){INFINITY, 0, 1};
}

/* A node is a state of the lattice, reached with a history of each grammar. */
typedef struct {
    double cost; /* of the best path to it */
    int32_t state, first_history, large_history;
    int32_t next; /* the next node of its state, -1 for none */
    int32_t has_epsilon; /* an arc without label leads to it */
} Node;

typedef struct {
    Node *nodes;
    int64_t num_nodes, capacity;
    int32_t *slots; /* open addressing: a node's number, -1 where empty */
    uint64_t num_slots;
    int32_t *firsts, *lasts; /* the nodes of each state, in the order of their making */
} Nodes;

static uint64_t slot_of(const Nodes *n, int32_t state, int32_t first, int32_t large) {
    uint64_t hash = (uint64_t)(uint32_t)state * 0x9E3779B97F4A7C15u;
    hash = (hash ^ (uint32_t)first) * 0xBF58476D1CE4E5B9u;
    hash = (hash ^ hash >> 29 ^ (uint32_t)large) * 0x94D049BB133111EBu;
    return (hash ^ hash >> 32) & (n->num_slots - 1);
}

static int32_t *find_slot(const Nodes *n, int32_t state, int32_t first, int32_t large) {
    uint64_t slot = slot_of(n, state, first, large);
    for (;; slot = (slot + 1) & (n->num_slots - 1)) {
        const int32_t number = n->slots[slot];
        if (number < 0) return n->slots + slot;
        const Node *node = n->nodes + number;
        if (node->state == state && node->first_history == first && node->large_history == large)
            return n->slots + slot;
    }
}

/* Make room for twice as many nodes; return 0 without memory. */
static int grow(Nodes *n) {
    const int64_t capacity = n->capacity ? 2 * n->capacity : FIRST_NODES;
    Node *nodes = realloc(n->nodes, (size_t)capacity * sizeof *nodes);
    if (nodes == NULL) return 0;
    n->nodes = nodes;
    int32_t *slots = realloc(n->slots, 2 * (size_t)capacity * sizeof *slots);
    if (slots == NULL) return 0;
    n->slots = slots;
    n->capacity = capacity;
    n->num_slots = 2 * (uint64_t)capacity;
    memset(slots, 0xFF, n->num_slots * sizeof *slots);
    for (int32_t number = 0; number < n->num_nodes; number++) {
        const Node *node = nodes + number;
        *find_slot(n, node->state, node->first_history, node->large_history) = number;
    }
    return 1;
}

/* Return the number of a node, which is made if it is new, or -1 without memory. */
static int32_t reach(Nodes *n, int32_t state, int32_t first, int32_t large, int32_t label,
                     double cost) {
    int32_t *slot = find_slot(n, state, first, large);
    if (*slot >= 0) {
        Node *node = n->nodes + *slot;
        if (cost < node->cost) node->cost = cost;
        node->has_epsilon |= !label;
        return *slot;
    }
    if (n->num_nodes == n->capacity) {
        if (!grow(n)) return -1;
        slot = find_slot(n, state, first, large);
    }
    const int32_t number = (int32_t)n->num_nodes++;
    *slot = number;
    n->nodes[number] = (Node){cost, state, first, large, -1, !label};
    if (n->firsts[state] < 0)
        n->firsts[state] = number;
    else
        n->nodes[n->lasts[state]].next = number;
    n->lasts[state] = number;
    return number;
}

/* What pruning knows of the lattice as it came. */
typedef struct {
    double *onward; /* of each state: the cost of the best path from it to the end */
    double *best;    /* of each number of frames: the least estimate of a path that reads them */
    int32_t *frames; /* of each state: the frames before it */
} LookAhead;

/* Words that the large grammar lacks lead nowhere. */
static int look_ahead(const Arc *raw, int64_t num_raw, int64_t num_states, const Grammar *large,
                      LookAhead *found) {
    found->onward = malloc((size_t)num_states * sizeof *found->onward);
    found->best = malloc((size_t)num_states * sizeof *found->best);
    found->frames = calloc((size_t)num_states, sizeof *found->frames);
    if (!found->onward || !found->best || !found->frames) return 0;
    for (int64_t state = 0; state < num_states; state++)
        found->onward[state] = found->best[state] = INFINITY;
    for (int64_t number = 0; number < num_raw; number++) {
        const Arc *arc = raw + number;
        found->frames[arc->target] = found->frames[arc->source] + (arc->label > 0);
    }
    found->onward[num_states - 1] = 0;
    for (int64_t number = num_raw - 1; number >= 0; number--) {
        const Arc *arc = raw + number;
        const double cost = cost_of(arc) + found->onward[arc->target];
        if (arc->word && isinf(read_word(large, large->start, arc->word).cost)) continue;
        if (cost < found->onward[arc->source]) found->onward[arc->source] = cost;
    }
    return 1;
}

typedef struct {
    const Grammar *first, *large;
    double scale, penalty, beam;
    int32_t ends_sentence;
} Rescoring;

/* Write the arcs of all nodes, node by node; their states are nodes. Return how many, or an error.
   A path's estimate is its cost so far and the lattice's own cost from there to the end. Of the
   nodes after each frame's label, those within the beam of the best estimate remain, and all that
   they reach without another label: so one path at least reads the next frame. */
static int64_t expand(const Arc *raw, int64_t num_raw, int64_t num_states, const Rescoring *by,
                      const LookAhead *ahead, Nodes *n, Arc *arcs, int64_t max_arcs) {
    int64_t num_arcs = 0, begin = 0, stop = 0;
    const int32_t last = (int32_t)num_states - 1;
    if (!grow(n) || reach(n, 0, by->first->start, by->large->start, 0, 0) < 0) return NO_MEMORY;
    for (int32_t state = 0; state < last; state++, begin = stop) {
        while (stop < num_raw && raw[stop].source == state) stop++;
        const double limit = ahead->best[ahead->frames[state]] + by->beam;
        for (int32_t number = n->firsts[state]; number >= 0; number = n->nodes[number].next) {
            const Node node = n->nodes[number]; /* a copy, as nodes move when they grow */
            if (!node.has_epsilon && node.cost + ahead->onward[state] > limit) continue;
            for (int64_t each = begin; each < stop; each++) {
                Arc arc = raw[each];
                int32_t histories[] = {node.first_history, node.large_history};
                if (arc.word || (arc.target == last && by->ends_sentence)) {
                    const Step was = read_word(by->first, node.first_history, arc.word);
                    const Step is = read_word(by->large, node.large_history, arc.word);
                    if (was.is_broken || is.is_broken) return BROKEN_GRAMMAR;
                    if (isinf(was.cost)) return UNKNOWN_WORD;
                    if (isinf(is.cost)) continue;
                    const double change = by->scale * is.cost - was.cost + (arc.word ? by->penalty : 0);
                    arc.graph_cost = (float)((double)arc.graph_cost + change);
                    histories[0] = was.history, histories[1] = is.history;
                }
                /* All paths have one end, also those that do not end a sentence. */
                if (arc.target == last) histories[0] = histories[1] = 0;
                if (isinf(ahead->onward[arc.target])) continue;
                if (num_arcs == max_arcs) return TOO_MANY_ARCS;
                const double cost = node.cost + cost_of(&arc);
                const int32_t target =
                    reach(n, arc.target, histories[0], histories[1], arc.label, cost);
                if (target < 0) return NO_MEMORY;
                const double estimate = cost + ahead->onward[arc.target];
                double *best = ahead->best + ahead->frames[arc.target];
                if (arc.label && estimate < *best) *best = estimate;
                arc.source = number, arc.target = target;
                arcs[num_arcs++] = arc;
            }
        }
    }
    return num_arcs;
}

/* Keep the arcs on paths within the beam, and number nodes in the order in which arcs leave them. */
static int64_t prune(const Nodes *n, int32_t last, double beam, Arc *arcs, int64_t num_arcs) {
    const int32_t end = n->firsts[last];
    if (end < 0) return NO_PATH;
    const size_t num_nodes = (size_t)n->num_nodes;
    double *onward = malloc(num_nodes * sizeof *onward);
    int32_t *numbers = malloc(num_nodes * sizeof *numbers);
    int64_t num_kept = NO_MEMORY;
    if (onward != NULL && numbers != NULL) {
        for (size_t node = 0; node < num_nodes; node++) onward[node] = INFINITY, numbers[node] = -1;
        onward[end] = 0;
        for (int64_t each = num_arcs - 1; each >= 0; each--) {
            const double cost = cost_of(arcs + each) + onward[arcs[each].target];
            if (cost < onward[arcs[each].source]) onward[arcs[each].source] = cost;
        }
        const double limit = n->nodes[end].cost + beam;
        int32_t num_numbers = 0;
        num_kept = 0;
        for (int64_t each = 0; each < num_arcs; each++) {
            const Arc arc = arcs[each];
            const double before = n->nodes[arc.source].cost;
            if (!(before + cost_of(&arc) + onward[arc.target] <= limit)) continue;
            if (numbers[arc.source] < 0) numbers[arc.source] = num_numbers++;
            arcs[num_kept++] = arc;
        }
        numbers[end] = num_numbers;
        for (int64_t each = 0; each < num_kept; each++) {
            arcs[each].source = numbers[arcs[each].source];
            arcs[each].target = numbers[arcs[each].target];
        }
    }
    free(onward);
    free(numbers);
    return num_kept;
}

/* Write the rescored lattice to `arcs`; return the number of its arcs, or an error. */
int64_t rescore(const Arc *raw, int64_t num_raw, int64_t num_states, const Grammar *first,
                const Grammar *large, double scale, double penalty, double beam,
                int32_t ends_sentence, Arc *arcs, int64_t max_arcs) {
    Nodes nodes = {0};
    LookAhead ahead = {0};
    const Rescoring by = {first, large, scale, penalty, beam, ends_sentence};
    const size_t of_states = (size_t)num_states * sizeof(int32_t);
    nodes.firsts = malloc(of_states);
    nodes.lasts = malloc(of_states);
    int64_t found = NO_MEMORY;
    if (nodes.firsts && nodes.lasts && look_ahead(raw, num_raw, num_states, large, &ahead)) {
        memset(nodes.firsts, 0xFF, of_states);
        found = expand(raw, num_raw, num_states, &by, &ahead, &nodes, arcs, max_arcs);
        if (found >= 0) found = prune(&nodes, (int32_t)num_states - 1, beam, arcs, found);
    }
    free(nodes.nodes);
    free(nodes.slots);
    free(nodes.firsts);
    free(nodes.lasts);
    free(ahead.onward);
    free(ahead.best);
    free(ahead.frames);
    return found;
}

/* Write the arcs of the best path, in reverse; return how many, or an error. Of equal paths, that
   of the first arcs. */
int64_t best_arcs(const Arc *arcs, int64_t num_arcs, int64_t num_states, int64_t *path) {
    double *costs = malloc((size_t)num_states * sizeof *costs);
    int64_t *ways = malloc((size_t)num_states * sizeof *ways);
    int64_t length = NO_MEMORY;
    if (costs != NULL && ways != NULL) {
        for (int64_t state = 0; state < num_states; state++) costs[state] = INFINITY;
        costs[0] = 0;
        for (int64_t each = 0; each < num_arcs; each++) {
            const double cost = costs[arcs[each].source] + cost_of(arcs + each);
            if (cost < costs[arcs[each].target]) {
                costs[arcs[each].target] = cost;
                ways[arcs[each].target] = each;
            }
        }
        length = isinf(costs[num_states - 1]) ? NO_PATH : 0;
        if (!length)
            for (int64_t state = num_states - 1; state; state = arcs[ways[state]].source)
                path[length++] = ways[state];
    }
    free(costs);
    free(ways);
    return length;
}

static double log_sum(double a, double b) {
    const double high = a > b ? a : b, low = a > b ? b : a;
    return isinf(high) ? high : high + log1p(exp(low - high));
}

/* Write each arc's posterior: the probability of the paths through it, which is proportional to
   exp(-scale cost). Return 0, or an error. */
int64_t arc_posteriors(const Arc *arcs, int64_t num_arcs, int64_t num_states, double scale,
                       double *posteriors) {
    double *before = malloc((size_t)num_states * sizeof *before);
    double *after = malloc((size_t)num_states * sizeof *after);
    int64_t result = NO_MEMORY;
    if (before != NULL && after != NULL) {
        for (int64_t state = 0; state < num_states; state++)
            before[state] = after[state] = -INFINITY;
        before[0] = after[num_states - 1] = 0;
        for (int64_t each = 0; each < num_arcs; each++) {
            const Arc *arc = arcs + each;
            const double path = before[arc->source] - scale * cost_of(arc);
            before[arc->target] = log_sum(before[arc->target], path);
        }
        for (int64_t each = num_arcs - 1; each >= 0; each--) {
            const Arc *arc = arcs + each;
            const double path = after[arc->target] - scale * cost_of(arc);
            after[arc->source] = log_sum(after[arc->source], path);
        }
        const double total = before[num_states - 1];
        result = isinf(total) ? NO_PATH : 0;
        for (int64_t each = 0; !result && each < num_arcs; each++) {
            const Arc *arc = arcs + each;
            const double around = before[arc->source] + after[arc->target];
            posteriors[each] = exp(around - scale * cost_of(arc) - total);
        }
    }
    free(before);
    free(after);
    return result;
}

/* Probabilities among the paths through a state. last: their latest word is `word`. new: so, and
   written since the last label. before: written since then, but another word followed. had: the
   word was there at the last label. behind: written since then by paths that did not have it. */
typedef struct {
    double last, new, before, had, behind;
} Shares;

/* Add to `lasting`, frame by frame, the probability that `word` is there: the last one written, or
   one of several before the same frame. Those behind all frames are at the last. How paths go on
   from a state does not depend on what they wrote before. Return 0, or an error. */
int64_t word_posteriors(const Arc *arcs, const double *posteriors, int64_t num_arcs,
                        int64_t num_states, int32_t word, double *lasting) {
    double *through = calloc((size_t)num_states, sizeof *through);
    Shares *shares = calloc((size_t)num_states, sizeof *shares);
    int32_t *frames = calloc((size_t)num_states, sizeof *frames);
    int64_t result = NO_MEMORY;
    if (through != NULL && shares != NULL && frames != NULL) {
        through[0] = 1;
        for (int64_t each = 0; each < num_arcs; each++) {
            const Arc *arc = arcs + each;
            const double part = through[arc->source] > 0 ? posteriors[each] / through[arc->source] : 0;
            const Shares was = shares[arc->source];
            Shares is = {part * was.last, part * was.new, part * was.before, part * was.had,
                         part * was.behind};
            if (arc->word == word) {
                is.last = is.new = posteriors[each];
                is.before = 0;
                is.behind = posteriors[each] - is.had;
            } else if (arc->word) {
                is.before += is.new;
                is.last = is.new = 0;
            }
            if (arc->label) {
                is.had = is.last + is.before;
                is.new = is.before = is.behind = 0;
                lasting[frames[arc->source]] += is.had;
            }
            Shares *there = shares + arc->target;
            there->last += is.last, there->new += is.new, there->before += is.before;
            there->had += is.had, there->behind += is.behind;
            through[arc->target] += posteriors[each];
            frames[arc->target] = frames[arc->source] + (arc->label > 0);
        }
        const int32_t num_frames = frames[num_states - 1];
        if (num_frames) lasting[num_frames - 1] += shares[num_states - 1].behind;
        result = 0;
    }
    free(through);
    free(shares);
    free(frames);
    return result;
}
