// Package deferral offers tools on demand. A model that has hundreds of external tools
// bound to each request chooses badly and pays for all of them; with deferral on it is
// told their names alone, searches, and is offered what it has found.
//
// The catalogue is made of the tools that have passed all lists and authorisation, so
// that a search cannot tell of any other (TOOL-05, DEFER-02). What was found is a
// promotion. It belongs to this very catalogue (DEFER-06), to one execution (DEFER-10),
// and never overrides what skills allow (DEFER-09): promotion only undoes the
// deferral, nothing else.
//
// [State] is a fold over the conversation's messages, so that whoever takes a
// conversation over has the same promotions.
package deferral
