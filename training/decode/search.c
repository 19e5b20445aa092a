/* Search a decoding graph, frame by frame, for its best path, and for a lattice of paths near it.

   Token passing with a beam and a bound on the active states (Kaldi's LatticeFasterDecoder). A
   token is a state that a path reaches with the frames so far, and the least cost of such paths.
   `ways` has the arc by which each token was reached, for the best path. A lattice has all arcs
   between tokens; every PRUNE_INTERVAL frames those go that no path within the lattice beam takes.
   The beam is halved where they would be too many still.

   search.py declares these functions and says what they return. All order comes from states and
   arcs, none from addresses, so that equal input has equal output. Little-endian; the graph is only
   read. Costs are sums of double precision. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LEAST_LATTICE_BEAM 1e-3

enum { PRUNE_INTERVAL = 25, LEAST_TABLE = 1024, LEAST_WAYS = 1 << 16 };

enum Status {
    OK = 0,
    NO_MEMORY = -1,
    TOO_MANY_ARCS = -2,
    EPSILON_CYCLE = -3,
    BAD_START = -4,
    BAD_ARCS = -5,
    BAD_ORDER = -6,
    BAD_TARGET = -7,
    BAD_LABEL = -8,
    BAD_WORD = -9,
    BAD_COST = -10,
    NEGATIVE_CYCLE = -11,
};

/* STATE and ARC of const_fst.py. */
typedef struct {
    float final_cost;
    uint32_t first_arc, num_arcs, num_input_epsilons, num_output_epsilons;
} State;

typedef struct {
    int32_t input_label, output_label;
    float cost;
    int32_t target;
} Arc;

typedef struct {
    const State *states;
    const Arc *arcs;
    int64_t num_states, num_arcs, start, num_labels, num_words;
} Graph;

/* `place` is the token's number in its frame: in a lattice, arcs lead to larger ones. */
typedef struct {
    double cost;
    int32_t state, place;
} Token;

typedef struct {
    int32_t previous; /* of the ways, -1 at the start */
    uint32_t arc;
} Way;

/* An entry of the table from states to tokens; the token is -1 in an empty one. */
typedef struct {
    int32_t state, token;
} Slot;

/* A token as the bound on active states sorts them. */
typedef struct {
    double cost;
    int32_t state;
} Rank;

/* FINAL is no arc of the graph: it leads to the lattice's end, and its acoustic cost is the final
   cost. */
#define FINAL UINT32_MAX

/* An arc between two nodes, of one frame or of two in a row. */
typedef struct {
    int32_t source, target;
    uint32_t arc;
    float acoustic_cost;
} Link;

/* `excess` is what the best path through a node costs beyond the best path of all, or less;
   -INFINITY before it is known. */
typedef struct {
    double cost, excess;
} Node;

/* The part of a lattice that has read the same frames: its nodes, the links between them in order
   of their sources, and the links to the next frame's nodes. */
typedef struct {
    Node *nodes;
    Link *epsilons, *links;
    int64_t num_nodes, num_epsilons, num_links;
} Frame;

/* SEARCH_ARC of search.py. */
typedef struct {
    int32_t source, target, label, word;
    float graph_cost, acoustic_cost;
} SearchArc;

typedef struct {
    Graph graph;
    double beam, lattice_beam; /* a negative one: no lattice */
    int64_t max_active, max_arcs;
    int status; /* what ended the search, or OK */

    Token *tokens, *reached; /* of this frame, and of the next one while it is made */
    int64_t num_tokens, num_reached, token_room, reached_room;
    Way *ways; /* those of this frame's tokens begin at `first_way` */
    int64_t num_ways, first_way, way_room, ways_kept;
    Slot *table;
    int64_t table_size;
    Rank *ranks;
    int64_t rank_room;
    int32_t *queue; /* of tokens */
    int64_t queue_room;

    Link *links; /* from this frame to the next one, while it is made */
    int64_t num_links, link_room;
    Link *epsilons; /* within a frame, while it is made; those of a token begin at its `firsts` */
    int64_t *firsts;
    int64_t epsilon_room, first_room;
    Frame *frames;
    int64_t num_frames, frame_room, most_nodes, num_kept;
} Search;

/* Make room for so many elements; what was there stays. */
static int reserve(void **array, int64_t *room, int64_t count, size_t size) {
    if (count <= *room) return OK;
    const int64_t wanted = count + count / 2 + 64;
    void *grown = realloc(*array, (size_t)wanted * size);
    if (!grown) return NO_MEMORY;
    *array = grown;
    *room = wanted;
    return OK;
}

#define RESERVE(array, room, count) reserve((void **)&(array), &(room), count, sizeof *(array))

/* Give back memory behind so many elements, where that is possible. */
static void shrink(void **array, int64_t count, size_t size) {
    void *smaller = realloc(*array, (size_t)count * size + 1);
    if (smaller) *array = smaller;
}

/* Return a copy of an array's beginning; an empty one has an address, too. */
static void *copied(const void *array, int64_t count, size_t size) {
    void *copy = malloc((size_t)count * size + 1);
    if (copy && count) memcpy(copy, array, (size_t)count * size);
    return copy;
}

/* Return NEGATIVE_CYCLE if a cycle of arcs that read no frame has, or leads to, one of negative
   cost: a search might follow it without end. `degrees` and `queue` have an element a state. */
static int64_t check_epsilons(const Graph *graph, int32_t *degrees, int32_t *queue,
                              int64_t *where) {
    memset(degrees, 0, (size_t)graph->num_states * sizeof *degrees);
    for (int64_t state = 0; state < graph->num_states; state++) {
        const Arc *arcs = graph->arcs + graph->states[state].first_arc;
        for (uint32_t i = 0; i < graph->states[state].num_input_epsilons; i++)
            degrees[arcs[i].target]++;
    }
    int64_t num_queued = 0;
    for (int64_t state = 0; state < graph->num_states; state++)
        if (!degrees[state]) queue[num_queued++] = (int32_t)state;
    for (int64_t next = 0; next < num_queued; next++) {
        const State *state = graph->states + queue[next];
        const Arc *arcs = graph->arcs + state->first_arc;
        for (uint32_t i = 0; i < state->num_input_epsilons; i++)
            if (!--degrees[arcs[i].target]) queue[num_queued++] = arcs[i].target;
    }
    /* What is left is in a cycle, or behind one. */
    for (int64_t state = 0; state < graph->num_states; state++) {
        if (!degrees[state]) continue;
        const Arc *arcs = graph->arcs + graph->states[state].first_arc;
        for (uint32_t i = 0; i < graph->states[state].num_input_epsilons; i++) {
            *where = state;
            if (arcs[i].cost < 0) return NEGATIVE_CYCLE;
        }
    }
    return OK;
}

/* Return OK if a search reads nothing outside the graph and ends; else what is wrong, and of which
   state. */
int64_t check_graph(const Graph *graph, int64_t *where) {
    *where = graph->start;
    if (graph->num_states > INT32_MAX || graph->num_arcs >= FINAL) return BAD_ARCS;
    if (graph->start < 0 || graph->start >= graph->num_states) return BAD_START;
    int64_t num_epsilons = 0, num_arcs = 0;
    for (int64_t number = 0; number < graph->num_states; number++) {
        const State *state = graph->states + number;
        *where = number;
        /* Arcs that states share could be counted beyond 32 bits below. */
        if ((int64_t)state->first_arc != num_arcs) return BAD_ARCS;
        num_arcs += state->num_arcs;
        if (num_arcs > graph->num_arcs) return BAD_ARCS;
        if (state->num_input_epsilons > state->num_arcs) return BAD_ARCS;
        if (isnan(state->final_cost) || state->final_cost == -INFINITY) return BAD_COST;
        num_epsilons += state->num_input_epsilons;
        const Arc *arcs = graph->arcs + state->first_arc;
        for (uint32_t i = 0; i < state->num_arcs; i++) {
            const Arc *arc = arcs + i;
            if (arc->target < 0 || arc->target >= graph->num_states) return BAD_TARGET;
            if (arc->input_label < 0 || arc->input_label > graph->num_labels) return BAD_LABEL;
            if (arc->output_label < 0 || arc->output_label >= graph->num_words) return BAD_WORD;
            if (!isfinite(arc->cost)) return BAD_COST;
            if ((arc->input_label == 0) != (i < state->num_input_epsilons)) return BAD_ORDER;
        }
    }
    if (num_arcs != graph->num_arcs) return BAD_ARCS;
    if (!num_epsilons) return OK;
    int32_t *degrees = malloc((size_t)graph->num_states * sizeof *degrees);
    int32_t *queue = malloc((size_t)graph->num_states * sizeof *queue);
    const int64_t status =
        degrees && queue ? check_epsilons(graph, degrees, queue, where) : NO_MEMORY;
    free(degrees);
    free(queue);
    return status;
}

static Slot *slot_of(const Search *s, int32_t state) {
    const uint64_t mask = (uint64_t)s->table_size - 1;
    uint64_t place = ((uint32_t)state * 2654435769u) & mask;
    while (s->table[place].token >= 0 && s->table[place].state != state) place = (place + 1) & mask;
    return s->table + place;
}

static void clear_table(Search *s) {
    memset(s->table, 0xff, (size_t)s->table_size * sizeof *s->table);
}

static int grow_table(Search *s) {
    Slot *table = realloc(s->table, 2 * (size_t)s->table_size * sizeof *table);
    if (!table) return NO_MEMORY;
    s->table = table;
    s->table_size *= 2;
    clear_table(s);
    for (int64_t i = 0; i < s->num_reached; i++)
        *slot_of(s, s->reached[i].state) = (Slot){s->reached[i].state, (int32_t)i};
    return OK;
}

/* Note a path to a state of the next frame. Return its token, or a negative status; *is_better says
   whether the path is the best to it so far. */
static int64_t reach(Search *s, int32_t state, double cost, int64_t previous, uint32_t arc,
                     int *is_better) {
    Slot *slot = slot_of(s, state);
    int64_t token = slot->token;
    *is_better = token < 0 || cost < s->reached[token].cost;
    if (token < 0) {
        token = s->num_reached;
        if (2 * (token + 1) > s->table_size) {
            if (grow_table(s)) return NO_MEMORY;
            slot = slot_of(s, state);
        }
        if (s->num_ways >= INT32_MAX) return NO_MEMORY;
        if (RESERVE(s->reached, s->reached_room, token + 1)) return NO_MEMORY;
        if (RESERVE(s->ways, s->way_room, s->num_ways + 1)) return NO_MEMORY;
        *slot = (Slot){state, (int32_t)token};
        s->reached[token] = (Token){cost, state, 0};
        s->num_reached++;
        s->num_ways++;
    }
    if (*is_better) {
        s->reached[token].cost = cost;
        s->ways[s->num_ways - s->num_reached + token] = (Way){(int32_t)previous, arc};
    }
    return token;
}

/* Follow the arcs that read no frame from the tokens reached, as far as the bound. A token waits in
   the queue at most once at a time, which `place` says meanwhile. */
static int follow_epsilons(Search *s, double bound) {
    int64_t num_queued = s->num_reached;
    if (RESERVE(s->queue, s->queue_room, num_queued)) return NO_MEMORY;
    for (int64_t i = 0; i < num_queued; i++) {
        s->queue[i] = (int32_t)i;
        s->reached[i].place = 1;
    }
    for (int64_t next = 0; next < num_queued; next++) {
        const int64_t source = s->queue[next];
        const Token token = s->reached[source];
        s->reached[source].place = 0;
        if (token.cost > bound) continue;
        const State *state = s->graph.states + token.state;
        for (uint32_t i = 0; i < state->num_input_epsilons; i++) {
            const uint32_t number = state->first_arc + i;
            const Arc *arc = s->graph.arcs + number;
            const double cost = token.cost + arc->cost;
            if (cost > bound) continue;
            int is_better;
            const int64_t way = s->num_ways - s->num_reached + source;
            const int64_t target = reach(s, arc->target, cost, way, number, &is_better);
            if (target < 0) return (int)target;
            if (!is_better || s->reached[target].place) continue;
            if (RESERVE(s->queue, s->queue_room, num_queued + 1)) return NO_MEMORY;
            s->queue[num_queued++] = (int32_t)target;
            s->reached[target].place = 1;
        }
    }
    return OK;
}

static int is_before(Rank one, Rank other) {
    return one.cost < other.cost || (one.cost == other.cost && one.state < other.state);
}

/* Return the rank that `count - 1` others are before; the ranks change places. */
static Rank select_first(Rank *ranks, int64_t num_ranks, int64_t count) {
    int64_t low = 0, high = num_ranks - 1, wanted = count - 1;
    while (low < high) {
        const Rank a = ranks[low], b = ranks[low + (high - low) / 2], c = ranks[high];
        const Rank pivot = is_before(a, b) ? (is_before(b, c) ? b : is_before(a, c) ? c : a)
                                           : (is_before(a, c) ? a : is_before(b, c) ? c : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (is_before(ranks[i], pivot)) i++;
            while (is_before(pivot, ranks[j])) j--;
            if (i > j) break;
            const Rank swapped = ranks[i];
            ranks[i++] = ranks[j];
            ranks[j--] = swapped;
        }
        if (wanted <= j)
            high = j;
        else if (wanted >= i)
            low = i;
        else
            break;
    }
    return ranks[wanted];
}

/* Forget the ways that lead to no token of this frame. */
static int drop_ways(Search *s) {
    int32_t *numbers = calloc((size_t)s->num_ways, sizeof *numbers);
    if (!numbers) return NO_MEMORY;
    for (int64_t i = s->first_way; i < s->num_ways; i++)
        for (int64_t way = i; way >= 0 && !numbers[way]; way = s->ways[way].previous)
            numbers[way] = 1;
    int64_t num_kept = 0;
    for (int64_t i = 0; i < s->num_ways; i++) numbers[i] = numbers[i] ? (int32_t)num_kept++ : -1;
    for (int64_t i = 0; i < s->num_ways; i++) {
        if (numbers[i] < 0) continue;
        const Way way = s->ways[i];
        s->ways[numbers[i]] = (Way){way.previous < 0 ? -1 : numbers[way.previous], way.arc};
    }
    s->first_way = num_kept - (s->num_ways - s->first_way);
    s->num_ways = s->ways_kept = num_kept;
    free(numbers);
    return OK;
}

/* List the arcs that read no frame between the tokens, those of token i from `firsts[i]` on. */
static int list_epsilons(Search *s, double bound, int64_t *num_epsilons) {
    const int64_t num_nodes = s->num_tokens;
    if (RESERVE(s->firsts, s->first_room, num_nodes + 1)) return NO_MEMORY;
    int64_t num_found = 0;
    for (int64_t i = 0; i < num_nodes; i++) {
        const Token token = s->tokens[i];
        const State *state = s->graph.states + token.state;
        s->firsts[i] = num_found;
        for (uint32_t k = 0; k < state->num_input_epsilons && token.cost <= bound; k++) {
            const uint32_t number = state->first_arc + k;
            const Arc *arc = s->graph.arcs + number;
            if (token.cost + arc->cost > bound) continue;
            if (RESERVE(s->epsilons, s->epsilon_room, num_found + 1)) return NO_MEMORY;
            const int32_t target = slot_of(s, arc->target)->token;
            s->epsilons[num_found++] = (Link){(int32_t)i, target, number, 0};
        }
    }
    s->firsts[num_nodes] = *num_epsilons = num_found;
    return OK;
}

/* Number the tokens so that these arcs lead to larger numbers: `queue` has them in that order. */
static int place_tokens(Search *s, int64_t num_epsilons) {
    const int64_t num_nodes = s->num_tokens;
    if (RESERVE(s->queue, s->queue_room, num_nodes)) return NO_MEMORY;
    /* `place` counts the arcs from tokens without a number, until its token has one. */
    for (int64_t i = 0; i < num_nodes; i++) s->tokens[i].place = 0;
    for (int64_t k = 0; k < num_epsilons; k++) s->tokens[s->epsilons[k].target].place++;
    int64_t num_placed = 0;
    for (int64_t i = 0; i < num_nodes; i++)
        if (!s->tokens[i].place) s->queue[num_placed++] = (int32_t)i;
    for (int64_t next = 0; next < num_placed; next++) {
        const int64_t i = s->queue[next];
        s->tokens[i].place = (int32_t)next;
        for (int64_t k = s->firsts[i]; k < s->firsts[i + 1]; k++) {
            const int32_t target = s->epsilons[k].target;
            if (!--s->tokens[target].place) s->queue[num_placed++] = target;
        }
    }
    return num_placed < num_nodes ? EPSILON_CYCLE : OK;
}

/* Begin the lattice's next frame with the tokens. */
static int add_frame(Search *s, double bound) {
    const int64_t num_nodes = s->num_tokens;
    int64_t num_epsilons;
    int status = list_epsilons(s, bound, &num_epsilons);
    if (!status) status = place_tokens(s, num_epsilons);
    if (status) return status;
    for (int64_t k = 0; k < s->num_links; k++)
        s->links[k].target = s->tokens[s->links[k].target].place;
    if (s->num_frames) {
        Frame *before = s->frames + s->num_frames - 1;
        before->links = copied(s->links, s->num_links, sizeof *s->links);
        if (!before->links) return NO_MEMORY;
        before->num_links = s->num_links;
    }
    if (RESERVE(s->frames, s->frame_room, s->num_frames + 1)) return NO_MEMORY;
    Frame *frame = s->frames + s->num_frames++;
    *frame = (Frame){malloc((size_t)num_nodes * sizeof(Node) + 1),
                     malloc((size_t)num_epsilons * sizeof(Link) + 1), NULL, num_nodes, 0, 0};
    if (!frame->nodes || !frame->epsilons) return NO_MEMORY;
    for (int64_t next = 0; next < num_nodes; next++) {
        const int64_t i = s->queue[next];
        frame->nodes[next] = (Node){s->tokens[i].cost, -INFINITY};
        for (int64_t k = s->firsts[i]; k < s->firsts[i + 1]; k++) {
            Link link = s->epsilons[k];
            link.source = (int32_t)next;
            link.target = s->tokens[link.target].place;
            frame->epsilons[frame->num_epsilons++] = link;
        }
    }
    if (num_nodes > s->most_nodes) s->most_nodes = num_nodes;
    s->num_kept += num_epsilons + s->num_links;
    s->num_links = 0;
    return OK;
}

/* Take the least excess of what follows a link; return whether the link stays. */
static int is_within(const Search *s, const Link *link, Node *source, const Node *target) {
    const float graph_cost = link->arc == FINAL ? 0 : s->graph.arcs[link->arc].cost;
    const double cost = source->cost + graph_cost + link->acoustic_cost;
    const double excess = target->excess + (cost - target->cost);
    if (!(excess <= s->lattice_beam)) return 0;
    if (excess < source->excess) source->excess = excess;
    return 1;
}

/* Give a frame the excesses of its nodes, and drop those nodes and links that no path within the
   lattice beam takes. `numbers` becomes the new numbers of its nodes, -1 for those dropped, and
   `next_numbers` has those of the next frame's. Return whether an excess grew by more than the
   tolerance, or a node was dropped: only then may links to this frame change. */
static int prune_frame(Search *s, Frame *frame, const Node *next_nodes, const int32_t *next_numbers,
                       int32_t *numbers, double *excesses, double tolerance) {
    for (int64_t i = 0; i < frame->num_nodes; i++) {
        excesses[i] = frame->nodes[i].excess;
        frame->nodes[i].excess = INFINITY;
    }
    int64_t num_links = 0, first_epsilon = frame->num_epsilons, num_nodes = 0;
    for (int64_t k = 0; k < frame->num_links; k++) {
        Link link = frame->links[k];
        link.target = next_numbers[link.target];
        if (link.target < 0) continue;
        if (is_within(s, &link, frame->nodes + link.source, next_nodes + link.target))
            frame->links[num_links++] = link;
    }
    /* From the last one on, as they lead to larger numbers; those kept move to the end. */
    for (int64_t k = frame->num_epsilons - 1; k >= 0; k--) {
        const Link link = frame->epsilons[k];
        if (is_within(s, &link, frame->nodes + link.source, frame->nodes + link.target))
            frame->epsilons[--first_epsilon] = link;
    }
    int has_changed = tolerance < 0;
    for (int64_t i = 0; i < frame->num_nodes; i++) {
        const Node node = frame->nodes[i];
        const int is_kept = node.excess <= s->lattice_beam;
        has_changed |= !is_kept || node.excess - excesses[i] > tolerance;
        numbers[i] = is_kept ? (int32_t)num_nodes : -1;
        if (is_kept) frame->nodes[num_nodes++] = node;
    }
    for (int64_t k = 0; k < num_links; k++)
        frame->links[k].source = numbers[frame->links[k].source];
    const int64_t num_epsilons = frame->num_epsilons - first_epsilon;
    for (int64_t k = 0; k < num_epsilons; k++) {
        Link link = frame->epsilons[first_epsilon + k];
        link.source = numbers[link.source];
        link.target = numbers[link.target];
        frame->epsilons[k] = link;
    }
    s->num_kept -= frame->num_links - num_links + first_epsilon;
    frame->num_links = num_links;
    frame->num_epsilons = num_epsilons;
    frame->num_nodes = num_nodes;
    shrink((void **)&frame->nodes, num_nodes, sizeof(Node));
    shrink((void **)&frame->links, num_links, sizeof(Link));
    shrink((void **)&frame->epsilons, num_epsilons, sizeof(Link));
    return has_changed;
}

/* Drop what no path within the lattice beam takes, where each of the last frame's nodes may be on
   the best path. An excess that is too small by the tolerance keeps too much for a while; without
   tolerance (-1) every frame is pruned. */
static int prune(Search *s, double tolerance) {
    const size_t most = (size_t)s->most_nodes + 1;
    int32_t *numbers = malloc(most * sizeof *numbers);
    int32_t *next_numbers = malloc(most * sizeof *next_numbers);
    double *excesses = malloc(most * sizeof *excesses);
    const int status = numbers && next_numbers && excesses ? OK : NO_MEMORY;
    int64_t f = s->num_frames - 1;
    for (int64_t i = 0; !status && i < s->frames[f].num_nodes; i++) {
        next_numbers[i] = (int32_t)i;
        s->frames[f].nodes[i].excess = 0;
    }
    int has_changed = 1;
    while (!status && has_changed && --f >= 0) {
        Frame *frame = s->frames + f;
        has_changed = prune_frame(s, frame, frame[1].nodes, next_numbers, numbers, excesses,
                                  tolerance);
        int32_t *swapped = numbers;
        numbers = next_numbers;
        next_numbers = swapped;
    }
    free(numbers);
    free(next_numbers);
    free(excesses);
    return status;
}

/* Halve the lattice beam until its arcs take half of their room, so that this is seldom due. */
static int narrow(Search *s) {
    int status = prune(s, -1);
    while (!status && s->num_kept > s->max_arcs / 2 && s->lattice_beam > LEAST_LATTICE_BEAM) {
        s->lattice_beam /= 2;
        status = prune(s, -1);
    }
    return !status && s->num_kept > s->max_arcs ? TOO_MANY_ARCS : status;
}

/* Make the tokens reached those of this frame. */
static int finish_frame(Search *s, double bound) {
    const int status = follow_epsilons(s, bound);
    if (status) return status;
    Token *tokens = s->tokens;
    const int64_t room = s->token_room;
    s->tokens = s->reached;
    s->token_room = s->reached_room;
    s->reached = tokens;
    s->reached_room = room;
    s->num_tokens = s->num_reached;
    s->first_way = s->num_ways - s->num_tokens;
    s->num_reached = 0;
    if (s->num_ways > 2 * s->ways_kept + LEAST_WAYS && drop_ways(s)) return NO_MEMORY;
    return s->lattice_beam < 0 ? OK : add_frame(s, bound);
}

/* Search one frame. */
static int search_frame(Search *s, const float *scores) {
    if (RESERVE(s->ranks, s->rank_room, s->num_tokens)) return NO_MEMORY;
    int64_t best = 0, num_ranks = 0;
    for (int64_t i = 1; i < s->num_tokens; i++)
        if (s->tokens[i].cost < s->tokens[best].cost) best = i;
    double beam = s->beam;
    Rank last = {s->num_tokens ? s->tokens[best].cost + beam : 0, INT32_MAX};
    for (int64_t i = 0; i < s->num_tokens; i++)
        if (s->tokens[i].cost <= last.cost)
            s->ranks[num_ranks++] = (Rank){s->tokens[i].cost, s->tokens[i].state};
    if (num_ranks > s->max_active) {
        last = select_first(s->ranks, num_ranks, s->max_active);
        /* As Kaldi's beam_delta: a little more than what max_active left of the beam. */
        const double left = last.cost - s->tokens[best].cost + 0.5;
        if (left < beam) beam = left;
    }
    clear_table(s);
    /* Paths of the next frame's beam; the best token's are a good first bound. */
    double bound = INFINITY;
    if (s->num_tokens) {
        const State *state = s->graph.states + s->tokens[best].state;
        for (uint32_t i = state->num_input_epsilons; i < state->num_arcs; i++) {
            const Arc *arc = s->graph.arcs + state->first_arc + i;
            const double cost =
                s->tokens[best].cost + arc->cost - (double)scores[arc->input_label - 1];
            if (cost + beam < bound) bound = cost + beam;
        }
    }
    for (int64_t source = 0; source < s->num_tokens; source++) {
        const Token token = s->tokens[source];
        if (is_before(last, (Rank){token.cost, token.state})) continue;
        const State *state = s->graph.states + token.state;
        for (uint32_t i = state->num_input_epsilons; i < state->num_arcs; i++) {
            const uint32_t number = state->first_arc + i;
            const Arc *arc = s->graph.arcs + number;
            const float acoustic_cost = -scores[arc->input_label - 1];
            const double cost = token.cost + arc->cost + acoustic_cost;
            if (cost > bound) continue;
            if (cost + beam < bound) bound = cost + beam;
            int is_better;
            const int64_t way = s->first_way + source;
            const int64_t target = reach(s, arc->target, cost, way, number, &is_better);
            if (target < 0) return (int)target;
            if (s->lattice_beam < 0) continue;
            if (RESERVE(s->links, s->link_room, s->num_links + 1)) return NO_MEMORY;
            s->links[s->num_links++] =
                (Link){token.place, (int32_t)target, number, acoustic_cost};
        }
    }
    const int status = finish_frame(s, bound);
    if (status || s->lattice_beam < 0) return status;
    if (s->num_kept > s->max_arcs) return narrow(s);
    return s->num_frames % PRUNE_INTERVAL ? OK : prune(s, 0.1 * s->lattice_beam);
}

void free_search(Search *s) {
    for (int64_t f = 0; f < s->num_frames; f++) {
        free(s->frames[f].nodes);
        free(s->frames[f].epsilons);
        free(s->frames[f].links);
    }
    free(s->tokens);
    free(s->reached);
    free(s->ways);
    free(s->table);
    free(s->ranks);
    free(s->queue);
    free(s->links);
    free(s->epsilons);
    free(s->firsts);
    free(s->frames);
    free(s);
}

/* Begin a search of a graph that was checked, and that lasts as long; NULL without memory. */
Search *new_search(const Graph *graph, double beam, int64_t max_active, double lattice_beam,
                   int64_t max_arcs) {
    Search *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->graph = *graph;
    s->beam = beam;
    s->max_active = max_active;
    s->lattice_beam = lattice_beam;
    s->max_arcs = max_arcs;
    s->table_size = LEAST_TABLE;
    s->table = malloc(LEAST_TABLE * sizeof *s->table);
    if (!s->table) {
        free(s);
        return NULL;
    }
    clear_table(s);
    int is_better;
    s->status = (int)reach(s, (int32_t)graph->start, 0, -1, 0, &is_better);
    if (!s->status) s->status = finish_frame(s, beam);
    return s;
}

/* Search the next frames, of `graph.num_labels` scores each; return a status. */
int64_t advance(Search *s, const float *scores, int64_t num_frames) {
    for (int64_t frame = 0; frame < num_frames && !s->status; frame++)
        s->status = search_frame(s, scores + frame * s->graph.num_labels);
    return s->status;
}

static double final_cost(const Search *s, Token token, int ends_sentence) {
    return token.cost + (ends_sentence ? s->graph.states[token.state].final_cost : 0);
}

/* Return 1 if a token's state is final. */
int64_t has_complete_path(const Search *s) {
    for (int64_t i = 0; i < s->num_tokens; i++)
        if (s->graph.states[s->tokens[i].state].final_cost < INFINITY) return 1;
    return 0;
}

/* Write the last `room` arcs of the best path, in order, and return how many it has; -1 without a
   path. It ends in a final state if that is asked for and one was reached. */
int64_t best_path(const Search *s, int64_t ends_sentence, uint32_t *arcs, int64_t room) {
    if (!s->num_tokens) return -1;
    const int is_final = ends_sentence && has_complete_path(s);
    int64_t best = 0, length = 0;
    for (int64_t i = 1; i < s->num_tokens; i++) {
        const Rank one = {final_cost(s, s->tokens[i], is_final), s->tokens[i].state};
        const Rank other = {final_cost(s, s->tokens[best], is_final), s->tokens[best].state};
        if (is_before(one, other)) best = i;
    }
    for (int64_t way = s->first_way + best; s->ways[way].previous >= 0;
         way = s->ways[way].previous) {
        length++;
        if (length <= room) arcs[room - length] = s->ways[way].arc;
    }
    return length;
}

/* End the lattice, which is pruned exactly to its beam. Return its number of arcs, or a negative
   status; 0 without a path. If no token is final, each may end a path, at no cost. */
int64_t end_lattice(Search *s) {
    if (s->status) return s->status;
    const int is_final = (int)has_complete_path(s);
    Frame end = {malloc(sizeof(Node)), malloc(1), malloc(1), 1, 0, 0};
    int status = NO_MEMORY;
    if (!end.nodes || !end.epsilons || !end.links) goto failed;
    if (RESERVE(s->frames, s->frame_room, s->num_frames + 1)) goto failed;
    end.nodes[0] = (Node){INFINITY, 0};
    for (int64_t i = 0; i < s->num_tokens; i++) {
        const Token token = s->tokens[i];
        const float final = is_final ? s->graph.states[token.state].final_cost : 0;
        const double cost = token.cost + final;
        if (cost == INFINITY) continue;
        if (RESERVE(s->links, s->link_room, s->num_links + 1)) goto failed;
        s->links[s->num_links++] = (Link){token.place, 0, FINAL, final};
        if (cost < end.nodes[0].cost) end.nodes[0].cost = cost;
    }
    Frame *last = s->frames + s->num_frames - 1;
    last->links = copied(s->links, s->num_links, sizeof *s->links);
    if (!last->links) goto failed;
    last->num_links = s->num_links;
    s->num_kept += s->num_links;
    s->frames[s->num_frames++] = end;
    status = prune(s, -1);
    return status ? status : s->num_kept;
failed:
    free(end.nodes);
    free(end.epsilons);
    free(end.links);
    return status;
}

/* Write the arcs of the lattice that has ended. */
void read_lattice(const Search *s, SearchArc *arcs) {
    int64_t first = 0;
    for (int64_t f = 0; f < s->num_frames; f++) {
        const Frame *frame = s->frames + f;
        const int64_t first_next = first + frame->num_nodes;
        for (int64_t k = 0; k < frame->num_epsilons + frame->num_links; k++) {
            const int is_epsilon = k < frame->num_epsilons;
            const Link link =
                is_epsilon ? frame->epsilons[k] : frame->links[k - frame->num_epsilons];
            const int64_t source = first + link.source;
            const int64_t target = (is_epsilon ? first : first_next) + link.target;
            *arcs++ = link.arc == FINAL
                          ? (SearchArc){(int32_t)source, (int32_t)target, 0, 0,
                                        link.acoustic_cost, 0}
                          : (SearchArc){(int32_t)source, (int32_t)target,
                                        s->graph.arcs[link.arc].input_label,
                                        s->graph.arcs[link.arc].output_label,
                                        s->graph.arcs[link.arc].cost, link.acoustic_cost};
        }
        first = first_next;
    }
}
