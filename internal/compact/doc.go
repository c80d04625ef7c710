// Package compact keeps long conversations within what a model can read. Before
// the model is asked it looks how large the conversation is; when a trigger is
// reached, a model summarises the older part, which is then taken out. The summary
// is no message: it has a field of its own and is shown with each later request as
// data, behind a note that data is no instruction.
//
// What stays always begins well: a call and its results are never parted, and the
// newest message of a person stays wherever it is.
//
// How large a conversation is, is what the provider counted for the last request,
// and a tokenizer's count for what has come since.
package compact
