package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"berth/runtime/admin"
)

var errFindings = errors.New("not everything is as it should be")

func imageCheck(d *daemon) *cobra.Command {
	var repair bool
	c := &cobra.Command{
		Use: "check [NAME...]", Short: "Compare what is stored of images with what came",
		Long: `Read everything that is stored of the images named (of all, and what belongs to no
image, when none is) and compare it with what came: every file of every layer by
content, mode, owner, time and extended attributes. It takes as long as reading takes.
The exit code is 1 when something is not as it should be, or was not repaired.

Layers with findings are fetched again by the next pull or import of an image that
has them. With --repair berth does that itself, from the blobs that
image.keep_layer_blobs has kept, or by digest from the registry with the logins of
image.auth_file. Running containers stay on the old files, new ones get the new.`,
	}
	c.Flags().BoolVar(&repair, "repair", false, "mend what is found")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		reply, err := ask(cmd.Context(), d, admin.CheckImages, admin.CheckRequest{Images: args, Repair: repair})
		if err != nil {
			return err
		}
		if err := d.print(cmd, reply, func(w io.Writer) { checkTable(w, reply) }); err != nil {
			return err
		}
		return verdict(reply, repair)
	}
	return d.listing(c)
}

// verdict is an error when something is left to be done.
func verdict(r *admin.CheckReply, repair bool) error {
	if len(r.Findings) > 0 && !repair {
		return errFindings
	}
	for _, did := range r.Repairs {
		if !did.Done {
			return errFindings
		}
	}
	return nil
}

func checkTable(w io.Writer, r *admin.CheckReply) {
	fmt.Fprintf(w, "%d images, %d layers checked: %d findings\n", r.Images, r.Layers, len(r.Findings))
	for _, f := range r.Findings {
		what := f.Where
		if f.Path != "" {
			what += " " + fmt.Sprintf("%q", f.Path)
		}
		fmt.Fprintf(w, "%s: %s", what, f.Problem)
		for i, name := range f.Images {
			fmt.Fprint(w, map[bool]string{true: " (image ", false: ", "}[i == 0], name)
		}
		if len(f.Images) > 0 {
			fmt.Fprint(w, ")")
		}
		fmt.Fprintln(w)
	}
	for _, did := range r.Repairs {
		state, name := "not repaired", did.Image
		if did.Done {
			state = "repaired"
		}
		if name == "" {
			name = "the rest"
		}
		fmt.Fprintf(w, "%s %s: %s\n", state, name, did.Message)
	}
}

func imageDu(d *daemon) *cobra.Command {
	c := &cobra.Command{
		Use: "du", Short: "Show what takes the disk, by image and by kind", Args: cobra.NoArgs,
		Long: `Show what each image takes on disk. TOTAL has everything that it shares with other
images. UNIQUE is what removing it frees, once no container uses it. Below are the
kinds of things in the images' directory, which add up to what du counts there, and
the containers' directory, which has their writable layers.`,
	}
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		reply, err := ask(cmd.Context(), d, admin.DiskUsage, admin.DiskUsageRequest{})
		if err != nil {
			return err
		}
		return d.print(cmd, reply, func(w io.Writer) { duTable(w, reply) })
	}
	return d.listing(c)
}

func duTable(w io.Writer, r *admin.DiskUsageReply) {
	fmt.Fprintln(w, "NAME\tID\tTOTAL\tUNIQUE\tINODES\tSHARED WITH\tUSED BY")
	for _, i := range r.Images {
		name, shared := "<none>", ""
		if len(i.Names) > 0 {
			name = i.Names[0]
		}
		if i.Removed {
			name = "<removed>"
		}
		if n := len(i.SharedWith); n > 0 {
			shared = fmt.Sprintf("%d images", n)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\n", name, short(i.ID), size(float64(i.Total.Bytes)), size(float64(i.Unique.Bytes)), i.Total.Inodes, shared, usedBy(i.UsedBy))
	}
	fmt.Fprintf(w, "\nKIND\tSIZE\tBYTES\tINODES\n")
	for _, k := range append(r.Kinds, admin.Kind{Name: r.Root, Usage: r.Total}, admin.Kind{Name: "containers", Usage: r.Containers}) {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\n", k.Name, size(float64(k.Bytes)), k.Bytes, k.Inodes)
	}
}
