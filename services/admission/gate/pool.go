package gate

import (
	"container/heap"
	"container/list"
	"slices"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Pool is what a pool of executors may run at once.
type Pool struct {
	// MaxRunning is how many of its tasks may hold a slot.
	MaxRunning int
	Limits     Limits
}

// Limits bound how many tasks of one key may hold a slot of the pool at once. A
// task whose key is at its limit is passed over and keeps its place; within a key
// the order of the queue holds. Zero and an absent name mean no limit.
type Limits struct {
	PerTenant int
	// PerThread counts the threads of each tenant apart.
	PerThread int
	// PerType has the limit of each type of sub-agent, over all tenants.
	PerType map[string]int
}

// traits are what a task's keys are made of.
type traits struct {
	tenant contract.Tenant
	thread contract.ThreadID
	kind   string // type of the sub-agent
}

// key names a limit that applies to a task. The unused parts are empty.
type key struct {
	limit string // "tenant", "thread" or "type"
	traits
}

// signature is the part of a task's traits that is limited: tasks of one
// signature have the same keys, and are granted in the order of the queue.
func (l Limits) signature(t traits) traits {
	if l.PerTenant == 0 && l.PerThread == 0 {
		t.tenant = ""
	}
	if l.PerThread == 0 {
		t.thread = ""
	}
	if l.PerType[t.kind] == 0 {
		t.kind = ""
	}
	return t
}

// pool is the queue and the slots of one pool.
//
// Those that wait are grouped by signature. A group whose head could be granted,
// as far as is known, is open; one that was found at a limit is parked there, until
// a slot of that key comes free. So the next to be granted is found without a look
// at all those who are held back, and a slot that comes free wakes one group, not
// all.
type pool struct {
	name contract.Pool
	Pool

	slots slots
	// order has all that wait, in the order of the request stream.
	order  *list.List // of *task
	ranks  ranks
	groups map[traits]*group
	open   groups
	keys   map[key]*keyUse
}

// keyUse is the use of a key that has a limit.
type keyUse struct {
	key
	max              int
	running, waiting int
	parked           groups
}

// group is those of one signature that wait.
type group struct {
	sig     traits
	keys    []*keyUse
	waiters *list.List // of *task
	head    uint64     // request of the first waiter: what groups are ordered by
	in      *groups    // open, or parked at a key
	at      int        // place there
	from    *keyUse    // the key that it was parked at before it was opened
}

func newPool(name contract.Pool, p Pool) *pool {
	return &pool{name: name, Pool: p, order: list.New(), groups: map[traits]*group{}, keys: map[key]*keyUse{}, slots: newSlots()}
}

// add puts a task at the end of the queue.
func (p *pool) add(t *task) {
	p.renumber()
	t.place, t.rank = p.order.PushBack(t), p.ranks.add()
	sig := p.Limits.signature(t.req.traits())
	g := p.groups[sig]
	if g == nil {
		g = &group{sig: sig, keys: p.keysOf(sig), waiters: list.New(), head: t.req.Seq}
		p.groups[sig] = g
		p.open.add(g)
	}
	t.group, t.inGroup = g, g.waiters.PushBack(t)
	for _, k := range g.keys {
		k.waiting++
	}
}

// remove takes a task out of the queue.
func (p *pool) remove(t *task) {
	g := t.group
	p.order.Remove(t.place)
	p.ranks.remove(t.rank)
	first := g.waiters.Front() == t.inGroup
	g.waiters.Remove(t.inGroup)
	t.place, t.group, t.inGroup = nil, nil, nil
	for _, k := range g.keys {
		k.waiting--
	}
	switch next := g.waiters.Front(); {
	case !first:
		return
	case next == nil:
		heap.Remove(g.in, g.at)
		delete(p.groups, g.sig)
	default:
		g.head = next.Value.(*task).req.Seq
		heap.Fix(g.in, g.at)
	}
	p.replace(g)
	for _, k := range g.keys {
		p.drop(k)
	}
}

// pick returns the first task that may be granted now, or nil. It stays in the
// queue.
func (p *pool) pick() *task {
	if p.slots.used() >= p.MaxRunning {
		return nil
	}
	for len(p.open.of) > 0 {
		g := p.open.of[0]
		k := g.full()
		if k == nil {
			return g.waiters.Front().Value.(*task)
		}
		heap.Pop(&p.open)
		k.parked.add(g)
		p.replace(g)
	}
	return nil
}

// replace opens the group that is next at the key where g came from: g is no
// longer, or no longer alone, the first one there.
func (p *pool) replace(g *group) {
	if k := g.from; k != nil {
		g.from = nil
		p.offer(k)
	}
}

// offer opens the first of the groups that are parked at a key which has room.
func (p *pool) offer(k *keyUse) {
	if k.running < k.max && len(k.parked.of) > 0 {
		g := heap.Pop(&k.parked).(*group)
		g.from = k
		p.open.add(g)
	}
}

// full returns the first key of the group that has no room, or nil.
func (g *group) full() *keyUse {
	for _, k := range g.keys {
		if k.running >= k.max {
			return k
		}
	}
	return nil
}

// take gives a slot to a task; number 0 takes the lowest free one. It returns the
// number.
func (p *pool) take(id contract.TaskID, number int, t traits) int {
	p.leave(id)
	h := held{number: number, keys: p.keysOf(p.Limits.signature(t))}
	for _, k := range h.keys {
		k.running++
	}
	return p.slots.take(id, h)
}

// leave gives the slot of a task back, if it has one.
func (p *pool) leave(id contract.TaskID) {
	for _, k := range p.slots.leave(id) {
		k.running--
		p.offer(k)
		p.drop(k)
	}
}

// fits reports whether a task can be granted at once when so many tasks are
// granted before it: in all, and of each of its keys.
func (p *pool) fits(t *task, ahead int, of func(*keyUse) int) bool {
	if p.slots.used()+ahead >= p.MaxRunning {
		return false
	}
	return !slices.ContainsFunc(t.group.keys, func(k *keyUse) bool { return k.running+of(k) >= k.max })
}

// overfull reports whether the newest of those that wait would have to wait for
// somebody's end. A task that is being granted holds its slot already and has not
// left the queue yet; it counts once.
func (p *pool) overfull(t, granting *task) bool {
	twice := 0
	if granting != nil && granting.place != nil && granting.pool == p {
		twice = 1
	}
	return !p.fits(t, p.order.Len()-1-twice, func(k *keyUse) int {
		n := k.waiting - 1
		if twice > 0 && slices.Contains(granting.group.keys, k) {
			n--
		}
		return n
	})
}

func (p *pool) keysOf(sig traits) []*keyUse {
	var keys []*keyUse
	add := func(max int, k key) {
		if max == 0 {
			return
		}
		use := p.keys[k]
		if use == nil {
			use = &keyUse{key: k, max: max}
			p.keys[k] = use
		}
		keys = append(keys, use)
	}
	add(p.Limits.PerTenant, key{"tenant", traits{tenant: sig.tenant}})
	add(p.Limits.PerThread, key{"thread", traits{tenant: sig.tenant, thread: sig.thread}})
	if sig.kind != "" {
		add(p.Limits.PerType[sig.kind], key{"type", traits{kind: sig.kind}})
	}
	return keys
}

// drop forgets a key that nobody uses.
func (p *pool) drop(k *keyUse) {
	if k.running == 0 && k.waiting == 0 {
		delete(p.keys, k.key)
	}
}

// renumber makes the ranks dense again when most of them belong to tasks that
// have left.
func (p *pool) renumber() {
	if p.ranks.len() < 2*p.order.Len()+1024 {
		return
	}
	p.ranks = ranks{}
	for e := p.order.Front(); e != nil; e = e.Next() {
		e.Value.(*task).rank = p.ranks.add()
	}
}

// groups is a heap of groups by the request of their head.
type groups struct{ of []*group }

func (h *groups) add(g *group) {
	g.in = h
	heap.Push(h, g)
}

func (h *groups) Len() int           { return len(h.of) }
func (h *groups) Less(i, j int) bool { return h.of[i].head < h.of[j].head }
func (h *groups) Swap(i, j int) {
	h.of[i], h.of[j] = h.of[j], h.of[i]
	h.of[i].at, h.of[j].at = i, j
}

func (h *groups) Push(x any) {
	g := x.(*group)
	g.at = len(h.of)
	h.of = append(h.of, g)
}

func (h *groups) Pop() any {
	last := len(h.of) - 1
	g := h.of[last]
	h.of[last] = nil
	h.of = h.of[:last]
	return g
}

// slots are the numbers in use, from 1.
type slots struct {
	of   map[contract.TaskID]held
	by   map[int]contract.TaskID
	free ints // given back; some may be in use again
	top  int  // the highest number that was ever looked at
}

// held is a slot in use, with the keys that it counts for.
type held struct {
	number int
	keys   []*keyUse
}

func newSlots() slots {
	return slots{of: map[contract.TaskID]held{}, by: map[int]contract.TaskID{}}
}

func (s *slots) used() int { return len(s.of) }

func (s *slots) take(id contract.TaskID, h held) int {
	if h.number == 0 {
		h.number = s.lowest()
	}
	s.of[id], s.by[h.number] = h, id
	return h.number
}

// lowest is the lowest number that is not in use.
func (s *slots) lowest() int {
	for len(s.free) > 0 {
		if n := heap.Pop(&s.free).(int); s.by[n] == "" {
			return n
		}
	}
	for {
		s.top++
		if s.by[s.top] == "" {
			return s.top
		}
	}
}

func (s *slots) leave(id contract.TaskID) []*keyUse {
	h, ok := s.of[id]
	if !ok {
		return nil
	}
	delete(s.of, id)
	if s.by[h.number] == id {
		delete(s.by, h.number)
		if h.number <= s.top {
			heap.Push(&s.free, h.number)
		}
	}
	return h.keys
}

type ints []int

func (h ints) Len() int           { return len(h) }
func (h ints) Less(i, j int) bool { return h[i] < h[j] }
func (h ints) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *ints) Push(x any)        { *h = append(*h, x.(int)) }
func (h *ints) Pop() any {
	old := *h
	n := old[len(old)-1]
	*h = old[:len(old)-1]
	return n
}

// ranks counts those that came before, without a walk along the queue: a Fenwick
// tree over the order of arrival (P. Fenwick, 1994), from 1.
type ranks struct{ tree []int32 }

func (r *ranks) len() int { return len(r.tree) }

// add counts a new one and returns its index.
func (r *ranks) add() int {
	i := len(r.tree) + 1
	sum := int32(1)
	for step := 1; step < i&-i; step <<= 1 {
		sum += r.tree[i-step-1]
	}
	r.tree = append(r.tree, sum)
	return i
}

func (r *ranks) remove(i int) {
	for ; i <= len(r.tree); i += i & -i {
		r.tree[i-1]--
	}
}

// rank is how many of those that are there have an index of at most i.
func (r *ranks) rank(i int) int {
	n := 0
	for ; i > 0; i -= i & -i {
		n += int(r.tree[i-1])
	}
	return n
}
