package admin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/structpb"
)

// ErrInvalid: a message is not what the method takes.
var ErrInvalid = errors.New("invalid operator request")

// encode makes the message of a Go struct.
func encode(v any) (*structpb.Struct, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", v, err)
	}
	fields := map[string]any{}
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, fmt.Errorf("encode %T: %w", v, err)
	}
	m, err := structpb.NewStruct(fields)
	if err != nil {
		return nil, fmt.Errorf("encode %T: %w", v, err)
	}
	return m, nil
}

// decode fills a Go struct from a message. A request (strict) may have no field
// that its receiver does not know, for a demand must not get lost; a reply may.
func decode(m *structpb.Struct, v any, strict bool) error {
	data, err := json.Marshal(m.AsMap())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if strict {
		d.DisallowUnknownFields()
	}
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}
